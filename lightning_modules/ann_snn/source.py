"""The source network: built from a class path, filled with trained weights."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_modules.distributed import read_checkpoint
from lightning_modules.hub import fill, read_tensors

SHIPPED = Path(__file__).parent / "weights"


def build(class_path: str, init_args: dict[str, Any] | None = None) -> nn.Module:
    """Build a network.

    Args:
        class_path: names an `nn.Module`, or a function of torchvision or timm that makes one (such as
            `torchvision.models.resnet18`, `timm.create_model`). Nothing else is ever called, because the path also
            comes out of checkpoints.
        init_args: keyword arguments.

    Raises:
        ValueError: naming what is wrong with the class path or its arguments.
    """
    module, _, name = class_path.rpartition(".")
    try:
        made: Any = getattr(import_module(module), name) if module else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"network {class_path!r} cannot be imported: {error}") from None
    trusted = getattr(made, "__module__", "").startswith(("torchvision.models.", "timm.models."))
    if not (isinstance(made, type) and issubclass(made, nn.Module)) and not (callable(made) and trusted):
        raise ValueError(f"network {class_path!r} is no nn.Module and no model function of torchvision or timm")
    try:
        return made(**init_args or {})
    except (TypeError, RuntimeError, KeyError) as error:  # timm says RuntimeError to a model that it does not know
        raise ValueError(f"network {class_path}: {error}") from None


def load_weights(network: nn.Module, weights: str) -> None:
    """Fill a network with trained weights.

    Args:
        network: the parameters and buffers that must all be found, and no others.
        weights: the name of shipped weights (`digits`), a file (`.safetensors`, a state dict, or a Lightning
            checkpoint such as one of `ImageClassifier`), or the name of torchvision weights (such as
            `ResNet18_Weights.IMAGENET1K_V1`, downloaded by torchvision and checked against its hash).

    Raises:
        FileNotFoundError: if it is none of these.
        ValueError: if the file would execute code on load, or does not fit the network.
    """
    path = Path(weights)
    if (SHIPPED / f"{weights}.safetensors").is_file():
        path = SHIPPED / f"{weights}.safetensors"
    if path.suffix == ".safetensors" and path.is_file():
        state: dict[str, Any] = read_tensors(path)
    elif path.is_file():
        state = read_checkpoint(path)
        state = state.get("state_dict", state)
    elif "_Weights." in weights:
        from torchvision.models import get_weight

        try:
            state = get_weight(weights).get_state_dict(progress=True, check_hash=True)
        except (KeyError, AttributeError):
            raise ValueError(f"torchvision has no weights {weights!r}: see torchvision.models.list_models()") from None
        except OSError as error:
            raise FileNotFoundError(
                f"torchvision's weights {weights} could not be downloaded ({error}): put a state dict's file in weights"
            ) from None
    else:
        shipped = ", ".join(p.stem for p in SHIPPED.glob("*.safetensors"))
        raise FileNotFoundError(
            f"weights {weights!r} are no file, not shipped (shipped: {shipped}) and no torchvision weights"
        )
    fitting = _fit_names(state, set(network.state_dict()))
    fill(network, fitting, f"weights {weights!r}")


@torch.no_grad()
def check_data(network: nn.Module, images: torch.Tensor, classes: int) -> None:
    """Refuse data that the network cannot take, before a training starts.

    Args:
        network: maps images to logits; put into evaluation mode and back.
        images: float32 `[b, c, h, w]`, of which one is tried.
        classes: how many the data have.

    Raises:
        ValueError: naming the shape of the images, or the numbers of classes.
    """
    training = network.training
    try:
        logits = network.eval()(images[:1])
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the network cannot take images of shape {list(images.shape[1:])}: {reason}") from None
    finally:
        network.train(training)
    if logits.shape[-1] < classes:
        raise ValueError(f"the data have {classes} classes, the network {logits.shape[-1]}: set its network_args")


def _fit_names(state: dict[str, Any], wanted: set[str]) -> dict[str, torch.Tensor]:
    """Drop a wrapper's prefix (`module.`, `network.`, `model.` ...) and what stands outside it."""
    if wanted <= set(state):
        return {k: state[k] for k in state if k in wanted}
    for prefix in {k.split(".")[0] + "." for k in state}:
        inner = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        if wanted <= set(inner):
            return {k: inner[k] for k in wanted}
    return dict(state)
