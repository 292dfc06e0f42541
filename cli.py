"""The front door: `python cli.py fit -c configs/<method>/<data>.yaml`, or `fulgurite fit -c <method>/<data>`.

A thin LightningCLI. What the extra subcommands do lives in the folders they are about.
"""

import errno
import logging
import os
import re
import sys
import warnings
from importlib import import_module
from pathlib import Path

EXTRA_COMMANDS = {
    "configs": ("configs", "main", "list the shipped configs"),
    "consolidate": (
        "lightning_modules.distributed",
        "consolidate_main",
        "join a sharded checkpoint into one file",
    ),
}

HELP = f"""usage: fulgurite COMMAND [options]

  fit       train:               fulgurite fit -c METHOD/DATA [-c strategy/ddp] [-c logger/wandb] [--model.x VALUE]
  validate  on validation data:  fulgurite validate -c RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
  test      on test data:        fulgurite test -c RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
  predict   on your files:       fulgurite predict -c RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt
{"".join(f"  {name:9} {text}" + chr(10) for name, (_, _, text) in EXTRA_COMMANDS.items())}
fit --dry_run prints parameters, memory and shapes, and trains nothing.
-c takes a file or the name of a shipped config, and may be given again: later values win.
`fulgurite fit --model.help CLASS` and `--data.help CLASS` explain a method's and a data module's options,
`fulgurite fit --help` all the rest. `fulgurite --version` prints the version.
FULGURITE_TRACEBACK=1 shows where an error came from."""


def main(args: list[str] | None = None) -> None:
    """Run one command; an error that the user can mend becomes one line and exit code 2."""
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        return print(HELP)
    if args[0] == "--version":
        from importlib.metadata import version

        return print(f"fulgurite {version('fulgurite')}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a class path may name a file of the folder in which the command is typed
    try:
        if args[0] in EXTRA_COMMANDS:
            module, function, _ = EXTRA_COMMANDS[args[0]]
            return getattr(import_module(module), function)(args[1:])
        run(args)
    except (ValueError, OSError, ImportError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            run_folder = os.environ.get("FULGURITE_RUN")
            where = f": the run was {run_folder}" if run_folder else ""
            error = OSError(f"the disk is full, or may hold no larger file ({error}){where}")
        fail(error)
    except Exception as error:  # from libraries: recognised by name, so that nothing is imported to say no
        if type(error).__module__.startswith("wandb."):
            fail(ValueError(f"{error} Or keep the run on this machine: -c logger/wandb_offline"))
        known = type(error).__name__ in ("ArgumentError", "MisconfigurationException", "UnpicklingError")
        if not known and not str(error).startswith(("Error(s) in loading state_dict", "Early stopping conditioned on")):
            raise
        fail(error)


def fail(error: Exception) -> None:
    """Print one line that names the culprit, and exit with 2."""
    if os.environ.get("FULGURITE_TRACEBACK"):
        raise error
    print(f"fulgurite: {concise(str(error))}", file=sys.stderr)
    sys.exit(2)


def concise(message: str) -> str:
    """Keep of the parser's message, which lists everything it tried, the part that names the culprit."""
    message = " ".join(message.split())
    unknown = re.match(r"unrecognized arguments: (--([\w.]+).*)", message)
    if unknown:
        return f"unrecognized arguments: {unknown[1]}{nearest(unknown[2])}"
    key = re.match(r'Parser key "([\w.]+)": ', message)
    if "Errors: - " in message:
        message = message.split("Errors: - ", 1)[1]
        message = re.split(r" - Expected a <class 'NoneType'>| Given value type: ", message)[0]
        message = (f"{key[1]}: " if key else "") + message.removeprefix("Problem with given class_path ")
    message = re.sub(r"Does not validate against any of the Union subtypes Subtypes: .*?Errors: - ", "", message)
    message = re.sub(r"- Expected a path but .*?(Type typing|Errors)", r"\1", message)
    message = re.sub(r"Type typing\.Callable\[.*\] expects a function or a callable class: ", "", message)
    message = re.split(r" - (?:Not a valid subclass of|Problem with given class_path) ", message)[0]
    message = message.replace("'list' object has no attribute 'keys'", "init_args takes names and values, not a list")
    option = re.search(r"'([\w.]+)': Option '(\w+)' is not accepted", message)
    if option:
        import inspect
        from difflib import get_close_matches

        module, _, name = option[1].rpartition(".")
        known = [p for p in inspect.signature(getattr(import_module(module), name)).parameters if p != "self"]
        near = get_close_matches(option[2], known, n=2)
        message += f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(known)}"
    return message


def nearest(option: str) -> str:
    """What an option that does not exist may have meant."""
    import inspect
    from difflib import get_close_matches

    from lightning.pytorch import Trainer

    section, dot, name = option.partition(".")
    known = ["model", "data", "trainer", "config", "ckpt_path", "name", "dry_run", "seed_everything", "weights_only"]
    if section == "trainer" and dot:
        known = [f"trainer.{p}" for p in inspect.signature(Trainer).parameters]
    near = get_close_matches(option if section == "trainer" else section, known, n=1)
    meant = near[0] + (dot + name if near and section != "trainer" else "") if near else ""
    return f"; did you mean --{meant}?" if near else ""


def run(args: list[str]) -> None:
    """`fit`, `validate`, `test` and `predict`."""
    from configs import checked, find
    from lightning_modules.memory import keep_freed_memory

    commands = ("fit", "validate", "test", "predict")
    if args[0] not in commands:
        from difflib import get_close_matches

        near = get_close_matches(args[0], [*commands, *EXTRA_COMMANDS], n=1)
        raise ValueError(
            f"unknown command {args[0]!r}" + (f": did you mean {near[0]}?" if near else "; see fulgurite --help")
        )
    for i, arg in enumerate(args):  # names of shipped configs become paths
        option, _, value = arg.partition("=")
        if option in ("-c", "--config"):
            if value:
                args[i] = f"{option}={checked(find(value))}"
            elif i + 1 < len(args):
                args[i + 1] = str(checked(find(args[i + 1])))
    keep_freed_memory()
    front_door()(args)


def front_door() -> type:
    """The LightningCLI, defined on first use: importing lightning takes seconds that `--version` need not wait."""
    import torch
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI

    from callbacks.run_folder import RunFolder, new_run_folder, run_folder_of
    from lightning_modules.distributed import read_checkpoint

    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # lightning's own use of a renamed class
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")  # frozen parts are meant to be
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "litlogger" not in record.getMessage() and "litmodels" not in record.getMessage()
    )

    class FrontDoor(LightningCLI):
        def __init__(self, args: list[str]) -> None:
            self.given = args
            self.checkpoint: dict = {}
            strict = {"exit_on_error": False, "allow_abbrev": False}
            super().__init__(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                save_config_callback=RunFolder,
                seed_everything_default=0,
                auto_configure_optimizers=False,
                trainer_defaults={"logger": {"class_path": "callbacks.MetricsCsv"}},
                parser_kwargs=strict | dict.fromkeys(("fit", "validate", "test", "predict"), strict),
                args=args,
            )

        def add_arguments_to_parser(self, parser) -> None:
            parser.add_argument(
                "--name",
                type=str | None,
                default=None,
                help="Where the run is filed: <default_root_dir or runs>/<name>/<time>. Default: folder and name of "
                "the first config.",
            )
            parser.add_argument(
                "--dry_run",
                action="store_true",
                help="Prepare the data and print parameters, memory and the shapes of a batch; train nothing.",
            )

        def parse_arguments(self, parser, args) -> None:
            self.config = parser.parse_args(args)

        def _parse_ckpt_path(self) -> None:
            """Fill in what the checkpoint stored and neither a config nor a flag names (they win here)."""
            command = self.config.subcommand
            config = self.config[command]
            if not config.get("ckpt_path"):
                return
            if config.ckpt_path in ("best", "last", "hpc"):  # these look in the folder of this run, which is new
                raise ValueError(
                    f"ckpt_path {config.ckpt_path!r}: name the file, RUN/checkpoints/{config.ckpt_path}.ckpt"
                )
            path = Path(config.ckpt_path)
            if (path / "checkpoints").is_dir():
                raise ValueError(f"ckpt_path {path} is a run folder: name {path / 'checkpoints' / 'last.ckpt'}")
            self.checkpoint = read_checkpoint(path, ["hyper_parameters", "callbacks", "pytorch-lightning_version"])
            if path.is_dir() and not shards(config.trainer.strategy):
                raise ValueError(
                    f"{path} is sharded, this strategy reads one file: `fulgurite consolidate {path}` first"
                )
            stored = dict(self.checkpoint.get("hyper_parameters", {}))
            stored.pop("_instantiator", None)
            saved_by, configured = stored.pop("_class_path", None), config.model.class_path
            if saved_by and saved_by.split(".")[-1] != configured.split(".")[-1]:
                raise ValueError(f"checkpoint {path} was saved by {saved_by}, the config has {configured}")
            if "pytorch-lightning_version" not in self.checkpoint:
                raise ValueError(f"{path} holds weights alone, not the checkpoint of a run: ckpt_path cannot take it")
            named = self.parser.parse_args(self.given, defaults=False)[command].get("model.init_args") or {}
            init_args = {k: v for k, v in stored.items() if k not in named and k in config.model.init_args}
            model = {"class_path": configured, "init_args": config.model.init_args.as_dict() | init_args}
            self.config = self.parser.parse_object({command: {"model": model}}, self.config)

        def before_instantiate_classes(self) -> None:
            config = self.config[self.subcommand]
            if config.dry_run:
                self.devices = count_devices(config.trainer)
                on_paper(config)
            check_devices(config.trainer, torch.cuda.is_available())
            config.name = config.name or name_of(config)
            if Path(config.name).is_absolute() or ".." in Path(config.name).parts:
                raise ValueError(f"name {config.name} leads out of the folder of runs: set trainer.default_root_dir")
            if self.subcommand != "fit" and not config.get("ckpt_path"):
                print(f"fulgurite: no --ckpt_path: this is a {self.subcommand} of the model that the config builds")
            self.to_save = config.clone()
            for option in ("dry_run", "verbose", "return_predictions"):  # what not every subcommand takes
                self.to_save.pop(option, None)
            checkpoint = Path(config.ckpt_path) if config.get("ckpt_path") else None
            run = run_folder_of(checkpoint) if checkpoint else None
            run = run or new_run_folder(Path(config.trainer.default_root_dir or "runs"), config.name)
            wandb_id = self.checkpoint.get("callbacks", {}).get("RunFolder", {}).get("wandb_id")
            for logger in listed(config.trainer.logger):
                if wandb_id and logger.class_path.endswith("WandbLogger") and logger.init_args.get("id") is None:
                    logger.init_args["id"] = wandb_id  # Lightning's logger resumes a run that exists
            config.trainer = fill_in(config.trainer, str(run))
            config.trainer.default_root_dir = str(run)

        def after_instantiate_classes(self) -> None:
            # Lightning would tell the trainer only after `configure_model`, which wants to know whether what it builds
            # will be overwritten
            run = self.config_init[self.subcommand]
            self.trainer.ckpt_path, run["ckpt_path"] = run.get("ckpt_path"), None
            for callback in self.trainer.callbacks:
                if isinstance(callback, RunFolder):
                    callback.config = self.to_save

        def _run_subcommand(self, subcommand: str) -> None:
            if not self.config[subcommand].dry_run:
                return super()._run_subcommand(subcommand)
            from lightning_modules.dry_run import dry_run

            for line in dry_run(self.trainer, self.model, self.datamodule, self.devices):
                print(line)

    return FrontDoor


def name_of(config) -> str:
    """`<method>/<data>`: folder and name of the first config file, or else the names of the two classes."""
    files = config.get("config") or []
    if files:
        first = Path(str(files[0]))
        return f"{first.resolve().parent.name}/{first.stem}"
    data = config.data.class_path.split(".")[-1] if config.get("data") else "data"
    return f"{config.model.class_path.split('.')[-1]}/{data}"


def count_devices(trainer) -> int:
    """Devices that the trainer's settings ask for; 1 if that is left open."""
    devices = len(trainer.devices) if isinstance(trainer.devices, list) else trainer.devices
    return int(devices) * trainer.num_nodes if str(devices).isdigit() else 1


def on_paper(config) -> None:
    """For a dry run: one process on the CPU, no logger, no workers."""
    simplest = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "logger": False}
    for name, value in simplest.items():
        config.trainer[name] = value
    if not str(config.trainer.precision).endswith("-true"):  # mixed precision keeps its weights in float32
        config.trainer.precision = "32-true"
    if config.get("data") and "num_workers" in (config.data.get("init_args") or {}):
        config.data.init_args.num_workers = 0


def listed(value) -> list:
    """Loggers are given as one, as a list, or as a switch."""
    return value if isinstance(value, list) else [value] if hasattr(value, "class_path") else []


def fill_in(value, run: str):
    """Put the run folder in place of `{run}` in every string."""
    if isinstance(value, str):
        return value.replace("{run}", run)
    if isinstance(value, list):
        return [fill_in(v, run) for v in value]
    if hasattr(value, "clone"):  # a jsonargparse Namespace
        filled = value.clone()
        for key, inner in vars(value).items():
            filled[key] = fill_in(inner, run)
        return filled
    return {k: fill_in(v, run) for k, v in value.items()} if isinstance(value, dict) else value


def shards(strategy) -> bool:
    """Whether the strategy reads sharded checkpoints."""
    name = strategy if isinstance(strategy, str) else strategy.class_path.split(".")[-1]
    return name.lower().startswith(("fsdp", "modelparallel", "model_parallel", "deepspeed"))


def check_devices(trainer, cuda: bool) -> None:
    """Refuse what cannot start here, before anything is built."""
    on_cpu = trainer.accelerator == "cpu" or (trainer.accelerator == "auto" and not cuda)
    strategy = trainer.strategy if isinstance(trainer.strategy, str) else trainer.strategy.class_path
    if on_cpu and (strategy.startswith("fsdp") or strategy.endswith(".FSDPStrategy")):
        raise ValueError(
            "FSDP1 needs GPUs and there is none here: use FSDP2, `-c strategy/fsdp2`, which runs on CPUs too"
        )
    cores = os.cpu_count() or 1
    if on_cpu and not re.fullmatch(r"auto|[1-9]\d*", str(trainer.devices)):
        raise ValueError(
            f"trainer.devices {trainer.devices} names no number of processes, and there is no GPU here: give a number"
        )
    if on_cpu and str(trainer.devices).isdigit() and int(trainer.devices) > cores:
        raise ValueError(f"trainer.devices {trainer.devices} is more than the {cores} CPU cores of this machine")


if __name__ == "__main__":
    main()
