import copy
import math
from contextlib import contextmanager

import pytest
import torch

from lightning_modules.dyn_vpp.networks import (
    SMALL_AUTOENCODER,
    SMALL_UNET,
    SVD_AUTOENCODER,
    SVD_UNET,
    ActionDecoder,
    ActionEncoder,
    Condition,
    VideoFormer,
    action_loss,
    action_sigmas,
    check_fit,
    decode,
    encode,
    first_step_features,
    guidance_scales,
    predict_clean,
    predict_velocity,
    sample_actions,
    video_autoencoder,
    video_unet,
)
from lightning_modules.dyn_vpp.objective import micro_batches, policy_loss
from lightning_modules.dyn_vpp.sampler import hybrid_schedule, karras_sigmas, rollout

TINY = SMALL_UNET | {
    "block_out_channels": (32, 32, 64),
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal",) * 2 + ("DownBlockSpatioTemporal",),
    "up_block_types": ("UpBlockSpatioTemporal",) + ("CrossAttnUpBlockSpatioTemporal",) * 2,
    "num_attention_heads": (2, 2, 4),
}


def size(module):
    return sum(p.numel() for p in module.parameters())


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    return video_unet(TINY).eval()


def condition(b=2, seed=0, h=8, w=8):
    g = torch.Generator().manual_seed(seed)
    ids = torch.tensor([[4.0, 127.0, 0.0]]).repeat(b, 1)
    return Condition(torch.randn(b, 1, 4, h, w, generator=g), torch.randn(b, 4, 32, generator=g), ids)


def test_published_and_small_sizes():
    with torch.device("meta"):
        assert size(video_unet(SVD_UNET)) == 1_524_623_082
        assert size(video_autoencoder(SVD_AUTOENCODER)) == 97_742_847
        assert size(video_unet(SMALL_UNET)) == 1_308_432
        assert all(p.is_meta for m in (video_unet(TINY), video_autoencoder(SMALL_AUTOENCODER)) for p in m.parameters())
        assert size(video_autoencoder(SMALL_AUTOENCODER)) == 1_017_944


def test_unet_reads_and_writes_the_folder_format_of_diffusers(unet, tmp_path):
    unet.save_pretrained(tmp_path)
    again = type(unet).from_pretrained(tmp_path).eval()
    x, c = torch.randn(2, 3, 4, 8, 8), condition()
    with torch.no_grad():
        torch.testing.assert_close(predict_velocity(again, x, 5.0, c), predict_velocity(unet, x, 5.0, c))


@torch.no_grad()
def test_group_chunks_guidance_and_sigmas_agree_with_one_by_one(unet):
    x, c, levels = torch.randn(4, 3, 4, 8, 8), condition(), torch.tensor([0.1, 1.0, 5.0, 20.0])
    alone = []
    for i in range(4):  # two videos of each of two contexts
        own = c.rows(slice(i // 2, i // 2 + 1))
        with_text = predict_velocity(unet, x[i : i + 1], levels[i].item(), own)
        without = predict_velocity(unet, x[i : i + 1], levels[i].item(), own._replace(text=0 * own.text))
        alone.append((with_text, without))
    with_text, without = (torch.cat(part) for part in zip(*alone, strict=True))
    torch.testing.assert_close(predict_velocity(unet, x, levels, c), with_text, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(predict_velocity(unet, x, levels, c, rows=3), with_text, atol=1e-5, rtol=1e-4)
    scales = guidance_scales(3, 5.0)
    assert scales.tolist() == [1, 3, 5]
    guided = predict_velocity(unet, x, levels, c, scales, rows=3)
    expected = without + torch.tensor([1.0, 3, 5]).view(3, 1, 1, 1) * (with_text - without)
    torch.testing.assert_close(guided, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(guided[:, 0], with_text[:, 0], atol=1e-5, rtol=1e-4)  # frame 0 is unguided
    clean = predict_clean(unet, x, levels, c)
    s = levels.view(4, 1, 1, 1, 1)
    torch.testing.assert_close(clean, x / (s**2 + 1) - s / (s**2 + 1).sqrt() * with_text, atol=1e-4, rtol=1e-4)


def test_ratio_and_shared_gradient_of_the_unet(unet):
    """The shared first step gives the gradient of the longer way, and ratio 1, with guidance and micro-batches.

    In float64: other numbers of rows in a pass round otherwise, and how much is the processor's affair. In float32 the
    ratio is 1 where the passes are alike, which is the first case.
    """
    b, g, f = 2, 3, 3
    c, scales, schedule = condition(), guidance_scales(f, 3.0), hybrid_schedule(karras_sigmas(2, 0.1, 20.0))
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(b, 1, f, 4, 8, 8, generator=generator)
    noise = torch.randn(1, b, g, f, 4, 8, 8, generator=generator)
    advantages = torch.randn(b, g, f, generator=generator)
    result = rollout(lambda x, s: predict_clean(unet, x, s, c, scales), start, noise, schedule)
    again = policy_loss(lambda x, s: predict_clean(unet, x, s, c, scales), result.steps[0], advantages)
    assert again.ratio_error < 1e-6

    unet = copy.deepcopy(unet).double()
    start, noise, advantages = start.double(), noise.double(), advantages.double()
    c, scales = Condition(*(part.double() for part in c)), scales.double()
    gradients = []
    for z, rows in ((start, None), (start, 1), (start.repeat(1, g, 1, 1, 1, 1), 4)):
        result = rollout(lambda x, s: predict_clean(unet, x, s, c, scales, rows=4), z, noise, schedule)
        unet.zero_grad()
        for part in micro_batches(result.steps, advantages, rows):
            own = c.rows(part.contexts)
            loss = policy_loss(
                lambda x, s, own=own: predict_clean(unet, x, s, own, scales),
                part.step,
                part.advantages,
                rescale=True,
            )
            assert loss.ratio_error < 1e-12
            (part.weight * loss.loss).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in unet.parameters() if p.grad is not None]))
    scale = gradients[0].abs().max().item()
    assert scale > 0
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-12 * scale, rtol=1e-9)


@contextmanager
def kept_for_backward(unet):
    """Bytes that a forward pass keeps, weights apart: the one entry of the list that it gives."""
    own, total = {p.untyped_storage().data_ptr() for p in unet.parameters()}, [0]

    def keep(x):
        total[0] += 0 if x.untyped_storage().data_ptr() in own else x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield total


def test_gradient_checkpointing_changes_nothing_but_memory_in_eval_mode(unet):
    x, c = torch.randn(2, 2, 4, 8, 8), condition()
    norms, kept = [], []
    for switch in (unet.disable_gradient_checkpointing, unet.enable_gradient_checkpointing):
        switch()
        unet.zero_grad()
        with kept_for_backward(unet) as total:
            loss = predict_clean(unet, x, 3.0, c).square().mean()
        kept += total
        loss.backward()
        norms.append(unet.conv_in.weight.grad.clone())
    unet.disable_gradient_checkpointing()
    unet.zero_grad()
    torch.testing.assert_close(*norms)
    assert kept[1] < 0.7 * kept[0]  # diffusers leaves the temporal attention out


def test_micro_batches_keep_their_share_of_the_memory(unet):
    b, g, f = 4, 8, 2
    c, schedule = condition(b), hybrid_schedule(karras_sigmas(2, 0.1, 20.0))
    shape = (f, 4, 8, 8)
    result = rollout(lambda x, s: predict_clean(unet, x, s, c), torch.randn(b, 1, *shape), torch.randn(1, b, g, *shape),
                     schedule)  # fmt: skip
    (whole,), parts = (micro_batches(result.steps, torch.randn(b, g, f), size) for size in (None, 1))
    kept = []
    for part in (whole, *parts):
        with kept_for_backward(unet) as total:
            own = c.rows(part.contexts)
            loss = policy_loss(lambda x, s, own=own: predict_clean(unet, x, s, own), part.step, part.advantages).loss
        kept += total
        loss.backward()
    unet.zero_grad()
    assert len(parts) == b and max(kept[1:]) < 0.3 * kept[0]


@pytest.mark.parametrize("h, w", [(8, 8), (12, 10)])  # (12, 10) is no multiple of 4: sizes are forced on the way up
@torch.no_grad()
def test_features_are_those_of_a_whole_forward(unet, h, w):
    start, c, sigma = torch.randn(2, 3, 4, h, w), condition(h=h, w=w), 20.0
    seen = {}
    hooks = [
        block.register_forward_hook(lambda m, i, o, k=k: seen.update({k: o})) for k, block in enumerate(unet.up_blocks)
    ]
    predict_velocity(unet, start * math.hypot(sigma, 1), sigma, c)
    for hook in hooks:
        hook.remove()
    calls = []
    tail = unet.up_blocks[2].register_forward_hook(lambda *_: calls.append(1))
    tokens = first_step_features(unet, start, sigma, c)
    tail.remove()
    assert not calls  # left before the last block
    assert not any(block._forward_hooks for block in unet.up_blocks)
    h1, w1 = seen[1].shape[-2:]
    assert tokens.shape == (2, 3, h1 * w1, 64 + 32)
    fine = tokens.view(2, 3, h1, w1, -1).permute(0, 1, 4, 2, 3).flatten(0, 1)
    torch.testing.assert_close(fine[:, 64:], seen[1])
    rows = torch.arange(h1) * seen[0].shape[-2] // h1
    columns = torch.arange(w1) * seen[0].shape[-1] // w1
    torch.testing.assert_close(fine[:, :64], seen[0][:, :, rows][..., columns])


@torch.no_grad()
def test_autoencoder_scales_and_unscales():
    torch.manual_seed(0)
    config = SMALL_AUTOENCODER | {"scaling_factor": 0.5}
    half, one = video_autoencoder(config).eval(), video_autoencoder(SMALL_AUTOENCODER).eval()
    one.load_state_dict(half.state_dict())
    video = torch.rand(2, 3, 3, 16, 16) * 2 - 1
    latents = encode(half, video)
    assert latents.shape == (2, 3, 4, 4, 4)
    torch.testing.assert_close(latents, encode(half, video))  # the mode: no noise
    torch.testing.assert_close(2 * latents, encode(one, video))
    assert decode(half, latents).shape == video.shape
    torch.testing.assert_close(decode(half, latents), decode(one, 2 * latents))
    torch.testing.assert_close(decode(half, latents)[:1], decode(half, latents[:1]), atol=1e-5, rtol=1e-4)


def test_errors_name_the_numbers(unet):
    with pytest.raises(ValueError, match="16"):
        check_fit(unet, 16, 32)
    with pytest.raises(ValueError, match="1024"):
        check_fit(unet, 4, 1024)
    check_fit(unet, 4, 32)
    with pytest.raises(ValueError, match="in_channels"):
        video_unet(TINY | {"in_channels": 4})
    with pytest.raises(ValueError, match="addition_time_embed_dim"):
        video_unet(TINY | {"addition_time_embed_dim": 64})


def test_features_of_the_published_network():
    with torch.device("meta"):
        unet = video_unet(SVD_UNET)
        wide = Condition(torch.empty(1, 1, 4, 32, 32), torch.empty(1, 20, 1024), torch.empty(1, 3))
        x = torch.empty(1, 16, 4, 32, 32)
        assert predict_clean(unet, x, 700.0, wide).shape == x.shape
        assert first_step_features(unet, x, 700.0, wide).shape == (1, 16, 256, 2560)


@pytest.mark.parametrize("sigma_max", [20.0, 700.0])
def test_ratio_in_bfloat16_autocast(unet, sigma_max):
    """Other batch sizes round differently in half precision; the sampler's maths stays in float32."""
    b, g, f = 2, 3, 3
    c, schedule = condition(), hybrid_schedule(karras_sigmas(3, 0.1, sigma_max))
    start, noise = torch.randn(b, g, f, 4, 8, 8), torch.randn(1, b, g, f, 4, 8, 8)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        result = rollout(lambda x, s: predict_clean(unet, x, s, c), start, noise, schedule)
        assert result.latents.dtype == torch.float32 and result.latents.isfinite().all()
        for part in micro_batches(result.steps, torch.randn(b, g, f), 1):
            own = c.rows(part.contexts)
            loss = policy_loss(lambda x, s, own=own: predict_clean(unet, x, s, own), part.step, part.advantages)
            assert loss.ratio_error < 1e-4


def test_video_former_and_action_head_shapes():
    with torch.device("meta"):
        assert VideoFormer()(torch.empty(2, 16, 512, 2560)).shape == (2, 224, 384)
        context = ActionEncoder()(torch.empty(2, 224, 384), torch.empty(2, 512))
        assert context.shape == (2, 225, 384)
        assert ActionDecoder()(torch.empty(2, 10, 7), torch.empty(2), context).shape == (2, 10, 7)


def test_video_former_reads_every_frame_and_position():
    torch.manual_seed(0)
    former = VideoFormer(features=8, frames=3, queries=2, width=16, layers=2, heads=2, head_width=8)
    features = torch.randn(1, 3, 5, 8, requires_grad=True)
    former(features)[0, 0].square().sum().backward()  # a token of frame 0
    assert (features.grad.abs().sum(-1) > 0).all()
    moved = features.detach()[:, :, torch.randperm(5)]
    torch.testing.assert_close(former(moved), former(features.detach()), atol=1e-5, rtol=1e-4)  # positions are a set


def test_action_head_learns_two_goals():
    """From noise the sampler returns the chunk that belongs to the goal."""
    torch.manual_seed(0)
    encoder = ActionEncoder(goal=2, width=32, layers=1, heads=2)
    decoder = ActionDecoder(actions=2, horizon=4, width=32, layers=2, heads=2)
    goals = torch.eye(2)
    chunks = 0.5 * torch.randn(2, 4, 2)
    tokens = torch.zeros(1, 1, 32)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=3e-3)
    first = None
    for _ in range(150):
        which = torch.randint(2, (64,))
        context = encoder(tokens.expand(64, -1, -1), goals[which])
        loss = action_loss(decoder, chunks[which], context, action_sigmas(torch.rand(64)), torch.randn(64, 4, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = first or loss.item()
    assert 0.5 < first < 2 and loss.item() < 0.5 * first
    encoder.eval(), decoder.eval()
    with torch.no_grad():
        actions = sample_actions(decoder, torch.randn(2, 4, 2), encoder(tokens.expand(2, -1, -1), goals))
    assert (actions - chunks).square().mean() < 0.25 * (actions - chunks.flip(0)).square().mean()


def test_action_sigmas_follow_the_cut_log_logistic():
    u = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    sigma = action_sigmas(u)
    assert (sigma.diff() > 0).all() and sigma[0] >= 1e-3 and sigma[-1] <= 80
    assert sigma[5000].item() == pytest.approx(0.5, rel=1e-3)  # the median is exp(location)
    assert sigma[0].item() == pytest.approx(1e-3) and sigma[-1].item() == pytest.approx(80)
    assert sigma[7500].item() == pytest.approx(0.5 * 3**0.5, rel=1e-2)  # third quartile: location + scale ln 3
