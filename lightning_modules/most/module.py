"""MoST as a LightningModule: wiring, logging, optimisers."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from tokenizers import Tokenizer
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.text import CharErrorRate, WordErrorRate
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightning_modules.distributed import gather_with_gradient, shard
from lightning_modules.hub import fill, instantiate, read_config, read_state, write_folder
from lightning_modules.most.balance import (
    BalanceForm,
    SegmentLoad,
    load_by_modality,
    segment_load,
    segment_values,
)
from lightning_modules.most.discriminators import AdversarialLosses, Discriminators
from lightning_modules.most.encoders import build_encoder
from lightning_modules.most.judge import Judge, normalise
from lightning_modules.most.language_model import load_language_model, upcycle
from lightning_modules.most.moe import MaskPosition, ModalityAwareLayer, make_modality_aware, moe_blocks
from lightning_modules.most.network import Expect, SpeechTextModel, token_losses
from lightning_modules.most.prompts import (
    TASKS,
    Example,
    Prompt,
    PromptBuilder,
    add_speech_tokens,
    choose_task,
    word_tokenizer,
)
from lightning_modules.most.units import Units, deduplicate
from lightning_modules.most.vocoder import DurationPredictor, MelLoss, UnitVocoder, duration_errors

FORMAT = 1
SCORES = {
    "loss": MeanMetric,
    "text_loss": MeanMetric,
    "wer": WordErrorRate,
    "cer": CharErrorRate,
    "wer_unseen_speakers": WordErrorRate,
    "wer_shuffled": WordErrorRate,
    "unit_error": WordErrorRate,
    "tts_stopped": MeanMetric,
    "unit_likelihood_accuracy": MeanMetric,
    "tts_wer_own_judge": WordErrorRate,
    "tts_wer": WordErrorRate,
}
SPOKEN = ("tts", "qa_speech", "interleaved")  # tasks whose sequences hold unit tokens


class Frames(NamedTuple):
    """What an encoder made of b utterances.

    Attributes:
        frames: float32 [b, l, f].
        count: int64 [b], frames of each.
    """

    frames: Tensor
    count: Tensor  # type: ignore[assignment] # instead of tuple's method


class Responses(NamedTuple):
    """What the model said to b prompts.

    Attributes:
        texts: b texts.
        units: b sequences of units, int64; empty where nothing was spoken.
        limit: most tokens that a response could have.
    """

    texts: list[str]
    units: list[Tensor]
    limit: int


class MoST(LightningModule):
    """A speech-text language model with modality-aware experts (MoST, arXiv:2601.10272).

    Batches are `datamodules.speech.Utterances`. Every utterance gets a task by weight; one loss, the mean cross
    entropy of all response tokens, text and units alike, plus the load-balance loss.

    Args:
        language_model: hub id or folder of a mixture of experts of transformers (deepseek_v2, qwen2_moe, qwen3_moe,
            olmoe, mixtral), or its configuration as a dict with `model_type` (random weights).
        tokenizer: hub id or folder; a list of words (or of single characters) for a new model; by default that of
            `language_model`.
        encoder: `log_mel`, hub id or folder of HuBERT, wav2vec 2 or Whisper, or the options of `FrozenEncoder`.
        partition: `contiguous` (the paper), `interleaved`, 0 or 1 for each expert, or null (VanillaMoE).
        mask: mask the router's scores `after_softmax` (the paper) or `before_softmax`.
        shared_expert: false drops the shared experts (NoShared).
        add_shared_width: width of a shared expert added to a family without one; 0 adds none.
        upcycle_experts: turn a dense `language_model` into so many experts per layer; 0 does not.
        upcycle_top_k: experts per token after upcycling.
        balance: form of the load-balance loss: `sequence` (the paper), `flat` or `modality`.
        balance_weight: its factor alpha, summed over layers.
        balance_counts_padding: count padding as text, as the official code does.
        tasks: weight of each task among asr, tts, text, qa_text, qa_speech, instruct and interleaved. Every row draws
            by weight among the tasks that it allows: audio and text allow asr, tts and interleaved; audio and answer
            qa_text, with a spoken answer qa_speech; text and answer instruct; text without an answer text. So the
            weights are shares of all rows only if every row allows every task: a row of text alone is `text` however
            small that weight is. How many rows of each kind there are is set with `shares` of `SpeechText`.
        num_units: number of unit tokens.
        units: file with a trained unit set (`Units.save`); by default one is trained by k-means before the first step.
        unit_frames: frames it is trained on.
        deduplicate: runs of equal units become one; the vocoder then predicts durations.
        vocoder_width: channels of the unit vocoder; 0 has none.
        vocoder_crop: units in the pieces it is trained on.
        vocoder_lr: its learning rate.
        vocoder_adversarial: weight of the discriminators' loss beside the log-mel distance; 0 has no discriminators.
            HiFi-GAN's is 1 / 45, with feature matching at twice that.
        discriminator_width: channels of the discriminators; HiFi-GAN's have 32.
        max_length: longest sequence in tokens.
        max_response: most tokens of a generated response.
        check_shuffled: also transcribe each validation batch with its audio exchanged between utterances.
        judge: hub id or folder of a CTC recogniser of transformers that transcribes generated speech in the test, such
            as `facebook/hubert-large-ls960-ft`; null has none.
        gradient_checkpointing: recompute activations in the backward pass.
        optimizer: by default AdamW with learning rate 5e-5, betas (0.9, 0.95) and weight decay 0.01.
        warmup_steps: steps of linear warm-up; then the learning rate falls to 0 along a cosine.
        init_from: checkpoint, or folder from `save_pretrained` or its id on the hub, whose weights are the start.
        architecture: filled in by checkpoints, so that they can be loaded without other files; leave it null.

    Attributes:
        expert_load: float [layers, 2, experts], picks by text and by audio tokens in this validation epoch.
    """

    block_types = (ModalityAwareLayer,)

    def __init__(
        self,
        language_model: str | dict[str, Any] = "deepseek-ai/DeepSeek-V2-Lite",
        tokenizer: str | list[str] | None = None,
        encoder: str | dict[str, Any] = "log_mel",
        partition: str | list[int] | None = "contiguous",
        mask: MaskPosition = "after_softmax",
        shared_expert: bool = True,
        add_shared_width: int = 0,
        upcycle_experts: int = 0,
        upcycle_top_k: int = 2,
        balance: BalanceForm = "sequence",
        balance_weight: float = 0.001,
        balance_counts_padding: bool = False,
        tasks: dict[str, float] | None = None,
        num_units: int = 500,
        units: str | None = None,
        unit_frames: int = 200_000,
        deduplicate: bool = False,
        vocoder_width: int = 0,
        vocoder_crop: int = 8,
        vocoder_lr: float = 2e-3,
        vocoder_adversarial: float = 0.0,
        discriminator_width: int = 32,
        max_length: int = 2048,
        max_response: int = 500,
        check_shuffled: bool = False,
        judge: str | None = None,
        gradient_checkpointing: bool = False,
        optimizer: OptimizerCallable | None = None,
        warmup_steps: int = 1000,
        init_from: str | None = None,
        # a plain dict: of a dict[str, Any] the command line would read the strings, a tokenizer's too, as YAML
        architecture: dict | None = None,  # type: ignore[type-arg]
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["init_from", "optimizer"])
        tasks = tasks or {"asr": 0.4, "tts": 0.4, "text": 0.2}
        if unknown := set(tasks) - set(TASKS):
            raise ValueError(f"tasks has {', '.join(sorted(unknown))}; known are {', '.join(TASKS)}")
        if min(tasks.values()) < 0 or max(tasks.values()) == 0:
            raise ValueError(f"tasks {tasks}: no weight may be negative, and one must be above 0")
        if isinstance(language_model, dict) and not isinstance(tokenizer, list | str):
            raise ValueError("a new language model needs a tokenizer: a list of words or of characters, or a hub id")
        self.tasks, self.optimizer, self.init_from = tasks, optimizer, init_from
        self.network: SpeechTextModel | None = None
        self.vocoder: UnitVocoder | None = None
        self.durations: DurationPredictor | None = None
        self.discriminators: Discriminators | None = None
        self.judge: Judge | None = None
        self.scores: Any = nn.ModuleDict({name: metric() for name, metric in SCORES.items()})

    # ------------------------------------------------------------------------------------------------ building

    def setup(self, stage: str) -> None:
        """Check that the data have the rate that the encoders need, and that weights are kept in float32."""
        if self.trainer.precision in ("bf16-true", "16-true"):
            raise ValueError(
                f"precision {self.trainer.precision} would change unit tokens and the router: use "
                f"{str(self.trainer.precision).replace('true', 'mixed')}"
            )
        rate = getattr(self.trainer.datamodule, "sample_rate", 16_000)
        if rate != 16_000:
            raise ValueError(
                f"the encoders need audio at 16000 Hz and the data module gives {rate}: set its sample_rate"
            )

    def configure_model(self) -> None:
        """Build or load the parts; does nothing the second time."""
        if self.network is not None:
            return
        h = self.hparams
        stored = h["architecture"] or {}
        self.encoder = build_encoder(stored.get("encoder", h["encoder"]))
        if "tokenizer" in stored:
            fast = Tokenizer.from_str(stored["tokenizer"]["json"])
            tokenizer = PreTrainedTokenizerFast(**stored["tokenizer"]["special"], tokenizer_object=fast)
        elif isinstance(h["tokenizer"], list):
            tokenizer = word_tokenizer(h["tokenizer"])
        else:
            tokenizer = AutoTokenizer.from_pretrained(h["tokenizer"] or h["language_model"])
        layout = add_speech_tokens(tokenizer, h["num_units"])
        source = stored.get("language_model", h["language_model"])
        if isinstance(source, dict):
            special = {"bos_token_id": layout.bos, "eos_token_id": layout.eos, "pad_token_id": layout.pad}
            source = special | {"vocab_size": layout.size} | source
        language_model = load_language_model(source)
        if h["upcycle_experts"] and "language_model" not in stored:
            language_model = upcycle(language_model, h["upcycle_experts"], h["upcycle_top_k"])
        config = language_model.config
        if config.vocab_size < layout.size:
            language_model.resize_token_embeddings(layout.size)
        if config.max_position_embeddings < h["max_length"]:
            raise ValueError(
                f"max_length {h['max_length']} is more than the language model's context, "
                f"{config.max_position_embeddings}"
            )
        make_modality_aware(
            language_model, h["partition"], h["mask"], h["shared_expert"], h["add_shared_width"]
        ).train()
        if h["gradient_checkpointing"]:
            language_model.gradient_checkpointing_enable({"use_reentrant": False})
        self.network = SpeechTextModel(language_model, layout, self.encoder.feature_size)
        given = bool(h["units"]) and not stored  # a checkpoint brings its own
        size = self.encoder.feature_size
        self.units = Units.load(Path(h["units"])) if given else Units(h["num_units"], size)
        if tuple(self.units.centroids.shape) != (h["num_units"], size):
            raise ValueError(
                f"{h['units']} has {self.units.count} units of size {self.units.centroids.shape[1]}; num_units is "
                f"{h['num_units']} and the encoder's frames have size {size}"
            )
        if h["vocoder_width"]:
            self.vocoder = UnitVocoder(
                h["num_units"], self.units.hash, self.encoder.samples_per_frame, h["vocoder_width"]
            )
            self.durations = DurationPredictor(h["num_units"]) if h["deduplicate"] else None
            self.mel_loss = MelLoss()
            self.discriminators = Discriminators(h["discriminator_width"]) if h["vocoder_adversarial"] else None
        self.prompts = PromptBuilder(tokenizer, layout, h["max_length"])
        self.expert_load = torch.zeros(len(moe_blocks(language_model)), 2, config.num_experts)
        self.hparams["architecture"] = {
            "language_model": json.loads(config.to_json_string(use_diff=False)),
            "tokenizer": {
                "json": tokenizer.backend_tokenizer.to_str(),
                "special": {k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)},
            },
            "encoder": self.encoder.description,
        }
        if self.init_from is not None and not (self._trainer and self.trainer.ckpt_path):  # which brings all weights
            wanted = self.units.hash
            fill(self, read_state(self.init_from), f"init_from {self.init_from}")
            if given and self.units.hash != wanted:
                raise ValueError(
                    f"init_from {self.init_from} speaks the unit set {self.units.hash}, and {h['units']} is "
                    f"{wanted}: leave out units"
                )
        shard(self.network, self.block_types, self.device_mesh)
        for part in (self.vocoder, self.durations, self.discriminators):
            if part is not None:
                shard(part, (), self.device_mesh)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `model.safetensors`, `config.json` (options, language model, tokenizer) and a model card."""
        options = {k: v for k, v in self.hparams.items() if not k.startswith("_")}
        write_folder(folder, MoST, FORMAT, options, self.state_dict())

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "MoST":
        """Read what `save_pretrained` wrote, from a folder or a hub id.

        Raises:
            FileNotFoundError: if there is no such folder and it cannot be downloaded.
            ValueError: if the folder was written by another class or a newer version.
        """
        folder, options = read_config(source, "MoST", FORMAT)
        model = instantiate(cls, options, folder)
        model.configure_model()
        fill(model, read_state(folder), folder)
        return model.eval()

    def configure_optimizers(self) -> Any:
        """AdamW, warm-up and cosine (MoST, training details); the vocoder has its own learning rate."""
        assert self.network is not None
        h = self.hparams
        groups: list[dict[str, Any]] = [{"params": [p for p in self.network.parameters() if p.requires_grad]}]
        if self.vocoder is not None:
            parts = [part for part in (self.vocoder, self.durations) if part is not None]
            groups.append({"params": [p for part in parts for p in part.parameters()], "lr": h["vocoder_lr"]})
        if self.discriminators is not None:
            groups.append({"params": list(self.discriminators.parameters()), "lr": h["vocoder_lr"]})
        optimizer: torch.optim.Optimizer
        if self.optimizer is None:
            optimizer = torch.optim.AdamW(groups, lr=5e-5, betas=(0.9, 0.95), weight_decay=0.01)
        else:
            optimizer = self.optimizer(groups)
        warmup = h["warmup_steps"]

        def factor(step: int) -> float:
            if step < warmup or step == 0:
                return (step + 1) / max(warmup, 1)
            # Asked for only now, in training: asking earlier sets up the loader before a resumed run has given it its
            # position.
            total = self.trainer.estimated_stepping_batches
            if math.isinf(total):
                return 1.0
            return 0.5 * (1 + math.cos(math.pi * min((step - warmup) / max(total - warmup, 1), 1.0)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the language model's, the vocoder's and the discriminators' gradients each on its own."""
        if gradient_clip_val:
            for group in optimizer.param_groups:
                nn.utils.clip_grad_norm_(group["params"], gradient_clip_val)

    def on_fit_start(self) -> None:
        """Train the unit set if none was given and none was restored."""
        spoken = any(self.tasks.get(task, 0) > 0 for task in SPOKEN) or self.vocoder is not None
        if spoken and self.units.centroids.count_nonzero() == 0:
            if self.trainer.datamodule is None:
                raise ValueError("the unit set is to be trained, which needs a data module: use one, or give units")
            frames: list[Tensor] = []
            for batch in self.trainer.datamodule.calibration_dataloader():
                if int(batch.length.max()) > 0:
                    encoded, count = self.encode(batch.audio.to(self.device), batch.length.to(self.device))
                    frames.append(_packed(encoded, count).cpu())
                if sum(map(len, frames)) >= self.hparams["unit_frames"]:
                    break
            if not frames:
                raise ValueError(
                    "the unit set is to be trained, and no training row has audio: add some, or give units"
                )
            self.units.cpu().fit(torch.cat(frames)[: self.hparams["unit_frames"]].numpy())
            self.units.to(self.device)
            self.units.centroids.copy_(self.trainer.strategy.broadcast(self.units.centroids))
            if self.vocoder is not None:
                self.vocoder.unit_hash = self.units.hash

    # ------------------------------------------------------------------------------------------------ inference

    @torch.no_grad()
    def encode(self, audio: Tensor, length: Tensor) -> Frames:
        """Frames float32 [b, l, f] and their number int64 [b], of audio [b, s] with lengths [b] in samples.

        In float32: unit tokens would change with the precision.
        """
        with torch.autocast(self.device.type, enabled=False):
            return Frames(*self.encoder(audio.float(), length))

    def forward(self, audio: Tensor, length: Tensor) -> list[str]:
        """Transcribe: float32 [b, s] samples at 16 kHz and int64 [b] lengths to b texts."""
        frames, count = self.encode(audio, length)
        return self._transcribe(frames, count)

    def speak(self, texts: list[str]) -> list[Tensor]:
        """Speak: b texts to b waveforms float32 [s] at the encoder's sample rate.

        Raises:
            ValueError: without a vocoder, or if it belongs to another unit set.
        """
        if self.vocoder is None:
            raise ValueError("the model has no vocoder: set vocoder_width and train it")
        self.vocoder.check(self.units.hash)
        return self._vocode(self._respond("tts", [Example("tts", text) for text in texts], None).units)

    def _vocode(self, units: list[Tensor]) -> list[Tensor]:
        assert self.vocoder is not None
        return self.vocoder.speak(units if self.durations is None else self.durations.lengthen(units))

    def answer(self, audio: Tensor, length: Tensor, spoken: bool = False) -> tuple[list[str], list[Tensor]]:
        """Answer spoken questions [b, s]: b texts, and b sequences of units (empty unless `spoken`)."""
        frames, count = self.encode(audio, length)
        task = "qa_speech" if spoken else "qa_text"
        responses = self._respond(task, [Example(task, frames=n) for n in count.tolist()], _packed(frames, count))
        return responses.texts, responses.units

    def _respond(self, task: str, examples: list[Example], frames: Tensor | None) -> "Responses":
        assert self.network is not None
        prompt = self._on_device(self.prompts(examples, respond=False))
        expect: dict[str, Expect] = {"tts": "speech", "qa_speech": "text_then_speech"}
        limit = min(self.hparams["max_response"], self.hparams["max_length"] - prompt.input_ids.shape[1])
        if limit < 5:
            longest = examples[int(prompt.attention_mask.sum(1).argmax())]
            raise ValueError(
                f"{longest.name or repr(longest.text)}: a prompt of {prompt.input_ids.shape[1]} tokens leaves no room "
                f"for a response in max_length {self.hparams['max_length']}"
            )
        out = self.network.generate(
            prompt.input_ids,
            frames,
            prompt.attention_mask,
            expect.get(task, "text"),
            limit,
            finished_everywhere=lambda done: bool(
                gather_with_gradient(torch.tensor([float(done)], device=self.device)).all()
            ),
        )
        layout = self.prompts.layout
        unit = (out >= layout.first_unit) & (out < layout.begin_audio)
        texts = self.prompts.tokenizer.batch_decode(
            [row[row < layout.first_unit] for row in out.cpu()], skip_special_tokens=True
        )
        units = [row[own] - layout.first_unit for row, own in zip(out, unit, strict=True)]
        return Responses([" ".join(text.split()) for text in texts], units, limit)

    def _on_device(self, prompt: Prompt) -> Prompt:
        return Prompt(*(x.to(self.device) for x in prompt))

    # ------------------------------------------------------------------------------------------------ training

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Loss of one batch of `Utterances`.

        Logs `train/loss` (all parts), `train/token_loss` (nats per response token), `train/balance` (load-balance
        loss per layer, before its factor; 1 is even for `modality`), `train/vocoder` (log-mel distance, with the loss
        of the durations) and, with discriminators, `train/discriminators` (their loss; 4 when they cannot tell and say
        1 / 2) and `train/vocoder_fooling` (the vocoder's; 0 when all of them take made speech for real).
        """
        heard = clean = self.encode(batch.audio, batch.length)
        if batch.clean_audio is not None:
            clean = self.encode(batch.clean_audio, batch.clean_length)
        examples, packed = self._examples(batch, heard, clean)
        token_loss, balance = self._losses(self.prompts(examples), packed)
        loss = token_loss + self.hparams["balance_weight"] * balance.sum()
        # each rank holds its share of the whole batch's loss: their mean is that loss
        self.log("train/token_loss", token_loss.detach(), prog_bar=True, sync_dist=True)
        self.log("train/balance", balance.mean().detach(), sync_dist=True)
        if self.vocoder is not None:
            audio = batch.audio if batch.clean_audio is None else batch.clean_audio
            vocoder, adversarial = self._vocoder_loss(audio, clean, batch.number)
            self.log("train/vocoder", vocoder.detach(), prog_bar=True, sync_dist=True)
            loss = loss + vocoder
            if adversarial is not None:
                self.log("train/discriminators", adversarial.discriminators.detach(), sync_dist=True)
                self.log("train/vocoder_fooling", adversarial.fooled, sync_dist=True)
                moves_vocoder = adversarial.generator + 2 * adversarial.features
                loss = loss + adversarial.discriminators + self.hparams["vocoder_adversarial"] * moves_vocoder
        self.log("train/loss", loss.detach(), sync_dist=True)
        return loss

    def _examples(self, batch: Any, heard: Frames, clean: Frames) -> tuple[list[Example], Tensor]:
        """A task for each utterance, and the frames that the prompts hear, packed; units are those of clean audio."""
        units = self.units(clean.frames)
        answer = Frames(heard.frames[:, :0], torch.zeros_like(heard.count))
        if batch.answer_audio.shape[1]:
            answer = self.encode(batch.answer_audio, batch.answer_length)
        answer_units = self.units(answer.frames)
        examples, listens = [], []
        numbers = zip(*(x.tolist() for x in (heard.count, clean.count, answer.count, batch.number)), strict=True)
        for i, (n, n_clean, n_answer, number) in enumerate(numbers):
            possible = []
            if batch.text[i]:
                possible = ["instruct"] if batch.answer[i] else ["text"]
            if n and batch.text[i]:
                possible += ["asr", "tts", "interleaved"]
            if n and batch.answer[i]:
                possible += ["qa_text"] + (["qa_speech"] if n_answer else [])
            task = choose_task(self.tasks, possible, number)
            own = answer_units[i, :n_answer] if task == "qa_speech" else units[i, :n_clean]
            if self.hparams["deduplicate"]:
                own = deduplicate(own)[0]
            hears = task in ("asr", "qa_text", "qa_speech")
            listens.append(hears)
            examples.append(
                Example(
                    task,
                    batch.text[i],
                    n if hears else 0,
                    own,
                    batch.answer[i],
                    text_first=int(number * 2**16) % 2 == 1,
                    name=batch.name[i],
                )
            )
        return examples, _packed(heard.frames, heard.count * torch.tensor(listens, device=heard.count.device))

    def _losses(self, prompt: Prompt, frames: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean cross entropy per response token over all ranks, and the load-balance loss of each layer."""
        assert self.network is not None
        prompt = self._on_device(prompt)
        logits = self.network(prompt.input_ids, frames, prompt.attention_mask)
        losses = token_losses(logits, prompt.labels)
        total = gather_with_gradient(losses.new_tensor([float(len(losses))])).sum()
        token_loss = losses.sum() * self._world / total
        modality = self.network.modality(prompt.input_ids)
        everything = self.hparams["balance_counts_padding"]
        valid = torch.ones_like(prompt.attention_mask) if everything else prompt.attention_mask
        form = self.hparams["balance"]
        layers = []
        for block in moe_blocks(self.network):
            assert block.routing is not None
            load = segment_load(block.routing, modality, valid, form)
            if form != "sequence":
                load = SegmentLoad(*(gather_with_gradient(x[None]).sum(0) for x in load))
            values = segment_values(load, block.routing.indices.shape[-1])
            used = (load.tokens > 0).float()
            share = used.sum()[None]
            if form == "sequence":
                share = gather_with_gradient(share) / self._world
            layers.append((values * used).sum() / share.sum().clamp(min=1e-9))
        return token_loss, torch.stack(layers)

    @property
    def _world(self) -> int:
        return self._trainer.world_size if self._trainer is not None else 1

    def _vocoder_loss(self, audio: Tensor, clean: Frames, number: Tensor) -> tuple[Tensor, AdversarialLosses | None]:
        """Log-mel distance on one piece of every utterance and the durations of its units; what discriminators say."""
        assert self.vocoder is not None
        size = self.vocoder.samples_per_unit
        spoken = clean.count > 0
        audio, number, frames, count = (x[spoken] for x in (audio, number, *clean))
        if len(count):
            units = self.units(frames)
            crop = min(self.hparams["vocoder_crop"], units.shape[1])
            start = (number * (count - crop + 1).clamp(min=1)).long()
            place = start[:, None] + torch.arange(crop, device=units.device)  # b crop
            audio = nn.functional.pad(audio, (0, units.shape[1] * size - audio.shape[1]))
            real = audio.unflatten(1, (-1, size)).gather(1, place[..., None].expand(-1, -1, size)).flatten(1)
            piece = units.gather(1, place)
        else:  # no audio here; other ranks may have some, and all parts take part on every rank
            piece = units = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            real, count = torch.zeros(1, size, device=self.device), torch.ones_like(units[0])
        made = self.vocoder(piece)
        share = self._share(int(spoken.sum()))
        with torch.autocast(self.device.type, enabled=False):
            loss = share * self.mel_loss(made.float(), real.float())
        if self.durations is not None:
            errors = duration_errors(self.durations, units, count)
            loss = loss + self._share(len(errors) if spoken.any() else 0) * errors.mean()
        if self.discriminators is None:
            return loss, None
        parts = self.discriminators(real.to(made.dtype), made)
        return loss, AdversarialLosses(*(share * part for part in parts))

    def _share(self, number: int) -> Tensor:
        """Factor of a mean over `number` items here, so that the mean over ranks is that over all of their items."""
        own = torch.tensor([float(number)], device=self.device)
        return own[0] * self._world / gather_with_gradient(own).sum().clamp(min=1)

    # ------------------------------------------------------------------------------------------------ evaluation

    def on_validation_epoch_start(self) -> None:
        """Begin a new count of expert loads."""
        self.expert_load.zero_()

    def on_test_epoch_start(self) -> None:
        """The same, and load the judge."""
        self.on_validation_epoch_start()
        if self.hparams["judge"] is not None and self.judge is None:
            self.judge = Judge(self.hparams["judge"], self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Transcribe and compare.

        Logs `val/wer` and `val/cer` (errors per word and per character; speakers seen in training),
        `val/wer_unseen_speakers`, `val/wer_shuffled` (audio exchanged within a rank's batch: near 1 unless the model
        guesses from text alone), `val/loss` (nats per transcript token) and `val/text_loss` (of the text alone).
        """
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        """Log the scores of all ranks."""
        self._log_scores("val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Transcribe, speak, and score.

        Logs what `validation_step` logs, under `test/`, and `test/text_perplexity`; where units are trained on,
        `test/unit_error` (edit distance of generated to real units per real unit), `test/tts_stopped` (share of
        utterances that end by themselves) and `test/unit_likelihood_accuracy` (share of utterances whose units are
        likelier per token than the same units in random order); with a vocoder, `test/tts_wer_own_judge` (errors per
        word in transcripts of generated speech by this very model) and, with a judge, `test/tts_wer` (the same by it,
        lower case, without punctuation).
        """
        self._evaluate(batch)
        if any(self.tasks.get(task, 0) > 0 for task in SPOKEN):
            self._evaluate_speech(batch)

    def on_test_epoch_end(self) -> None:
        """Log the scores of all ranks."""
        self._log_scores("test")

    def _log_scores(self, stage: str) -> None:
        for name, metric in self.scores.items():
            value = metric.compute()
            metric.reset()
            if not value.isnan():  # nothing to score, on any rank
                self.log(f"{stage}/{name}", value, prog_bar=name == "wer")
                if (stage, name) == ("test", "text_loss"):
                    self.log("test/text_perplexity", value.exp())

    def _evaluate(self, batch: Any) -> None:
        assert self.network is not None
        frames, count = self.encode(batch.audio, batch.length)
        given = zip(batch.text, count.tolist(), batch.name, strict=True)
        examples = [Example("asr", text, n, name=name) for text, n, name in given]
        prompt = self._on_device(self.prompts(examples))
        logits = self.network(prompt.input_ids, _packed(frames, count), prompt.attention_mask)
        self.scores["loss"].update(token_losses(logits, prompt.labels))
        modality = self.network.modality(prompt.input_ids)
        for total, block in zip(self.expert_load, moe_blocks(self.network), strict=True):
            assert block.routing is not None
            total += load_by_modality(block.routing, modality, prompt.attention_mask).cpu()
        self.scores["text_loss"].update(self.text_loss(batch.text))
        said = self._transcribe(frames, count, batch.name)
        for name, wanted in (("wer", False), ("cer", False), ("wer_unseen_speakers", True)):
            rows = [i for i, unseen in enumerate(batch.unseen.tolist()) if unseen == wanted]
            if rows:
                self.scores[name].update([said[i] for i in rows], [batch.text[i] for i in rows])
        if self.hparams["check_shuffled"]:
            shuffled = self._transcribe(frames.roll(1, 0), count.roll(1, 0))  # on all ranks: they generate together
            if len(said) > 1:
                self.scores["wer_shuffled"].update(shuffled, batch.text)

    @torch.no_grad()
    def text_loss(self, texts: list[str], all_experts: bool = False) -> Tensor:
        """Nats of every token of plain texts, [m].

        Args:
            texts: the texts.
            all_experts: let text tokens use every expert, as the base model did.
        """
        assert self.network is not None
        prompt = self._on_device(self.prompts([Example("text", text) for text in texts]))
        gates = [block.gate for block in moe_blocks(self.network)]
        groups = [gate.groups for gate in gates]
        try:
            if all_experts:
                for gate in gates:
                    gate.groups = None
            logits = self.network(prompt.input_ids, None, prompt.attention_mask)
        finally:
            for gate, own in zip(gates, groups, strict=True):
                gate.groups = own
        return token_losses(logits, prompt.labels)

    def _transcribe(self, frames: Tensor, count: Tensor, names: Sequence[str] | None = None) -> list[str]:
        names = names or [""] * len(count)
        examples = [Example("asr", frames=n, name=name) for n, name in zip(count.tolist(), names, strict=True)]
        return self._respond("asr", examples, _packed(frames, count)).texts

    def _evaluate_speech(self, batch: Any) -> None:
        frames, count = self.encode(batch.audio, batch.length)
        real = [self.units(f[:n]) for f, n in zip(frames, count.tolist(), strict=True)]
        if self.hparams["deduplicate"]:
            real = [deduplicate(u)[0] for u in real]
        _, made, limit = self._respond("tts", [Example("tts", text) for text in batch.text], None)
        self.scores["unit_error"].update(*([" ".join(map(str, u.tolist())) for u in side] for side in (made, real)))
        # begin_audio, end_audio and EOS are around the units of a response that had to be closed
        stopped = [float(len(u) < limit - 3) for u in made]
        self.scores["tts_stopped"].update(torch.tensor(stopped))
        seeds = [torch.Generator().manual_seed(i) for i in batch.index.tolist()]
        mixed = [u[torch.randperm(len(u), generator=g).to(u.device)] for u, g in zip(real, seeds, strict=True)]
        likelier = self.unit_likelihood(real) > self.unit_likelihood(mixed)
        self.scores["unit_likelihood_accuracy"].update(likelier.float())
        if self.vocoder is not None:
            self.vocoder.check(self.units.hash)
            speech = self._vocode(made)
            length = torch.tensor([len(s) for s in speech], device=self.device)
            audio = nn.utils.rnn.pad_sequence(speech, batch_first=True)
            self.scores["tts_wer_own_judge"].update(self(audio, length), batch.text)
            if self.judge is not None:
                self.scores["tts_wer"].update(self.judge(speech), [normalise(text) for text in batch.text])

    @torch.no_grad()
    def unit_likelihood(self, units: list[Tensor]) -> Tensor:
        """Mean log-likelihood per token of sequences of units, after BOS and `begin_audio`: float [b].

        What sWUGGY and sBLIMP compare between a real and a distorted utterance.
        """
        assert self.network is not None
        layout = self.prompts.layout
        prompt = self.prompts([Example("interleaved", units=own) for own in units])
        prompt = self._on_device(prompt)
        is_unit = (prompt.labels >= layout.first_unit) & (prompt.labels < layout.begin_audio)
        labels = torch.where(is_unit, prompt.labels, -100)
        logits = self.network(prompt.input_ids, None, prompt.attention_mask)
        owner = is_unit[:, 1:].nonzero()[:, 0]
        sums = torch.zeros(len(units), device=self.device).index_add(0, owner, -token_losses(logits, labels))
        return sums / is_unit.sum(1).clamp(min=1)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Transcripts of audio, or speech of texts.

        Returns:
            `index` int64 [b], `name` (the audio file) and `text` (its transcript) for a batch of audio; `index`,
            `text` and `samples` (b waveforms at 16 kHz) for a batch of texts.
        """
        if batch.audio.shape[1]:
            text = self._transcribe(*self.encode(batch.audio, batch.length), batch.name)
            return {"index": batch.index, "name": batch.name, "text": text}
        return {"index": batch.index, "text": batch.text, "samples": self.speak(batch.text)}


def _packed(frames: Tensor, count: Tensor) -> Tensor:
    """The first `count` [b] frames of each row of [b, l, f], one after the other: [n, f]."""
    return frames[torch.arange(frames.shape[1], device=frames.device) < count[:, None]]
