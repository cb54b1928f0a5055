"""Weights & Biases: a copy of a run's records for its web pages or `wandb leet`, and the no-op twin of it.

The run directory is the truth. So nothing here may stop, change or much delay a run: every failure of W&B
becomes one warning and the run goes on. Recording is offline unless `tracking.mode=online` asks otherwise: no
login, no prompt, no network, nothing on the terminal; `wandb sync DIR` uploads it later.

Which mode holds: the more private one of `tracking.mode` and the environment's WANDB_MODE (disabled, then
offline, then online). W&B alone would let the argument win. But whoever sets WANDB_MODE=offline on a machine
means every program on it, and WANDB_MODE=online must not send away a run that its config keeps at home.
WANDB_BASE_URL and WANDB_API_KEY (or `wandb login`) say where an online run goes; WANDB_ENTITY and WANDB_TAGS
serve where the config leaves them empty. WANDB_RUN_ID is not used: all runs of a sweep would become one.
"""

import functools
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tnvp.wandb_file import packed_records

MODES = ("disabled", "offline", "online")  # the more private first
INIT_SECONDS = 30.0  # how long an online run waits for the server at its start (W&B's own default: 90)
FINISH_SECONDS = 60.0  # and for the last upload at its end (W&B's own default: for ever)
FETCH_SECONDS = 60  # and for an answer when its runs are read
LOG_FLOOR = 1e-12  # a histogram's logarithmic scale begins here; smaller variances, such as 0, count as this
PRUNED_AXIS = "pruned/neuron_sparsity"
REMOVED_COLUMNS = ["step", "group", "neuron", "score"]

_logger = logging.getLogger(__name__)


class TrackingError(ValueError):
    """A W&B server that can't be read; the message says what to check."""


class Tracker:
    """Where a run's records are copied to; this one copies them nowhere. `mode="disabled"` gives it.

    where: the run's W&B page (online), the directory to give to `wandb sync` (offline), or "" (no copy).
    """

    where: str = ""

    def log(self, record: dict[str, Any]) -> None:
        """A record of metrics.jsonl; its "step" is the x-axis of all it holds."""

    def event(self, record: dict[str, Any]) -> None:
        """A record of events.jsonl: numbers as `pruned/*` over neuron sparsity, removed neurons in a table.

        `accuracy_after` is called `pruned/accuracy`. A group may have "removed_scores": the scores of its
        "removed" neurons, in their order.
        """

    def histogram(self, name: str, values: Iterable[float], step: int) -> None:
        """Variances, one a neuron, as histogram `log10_<name>` of log10(variance): they span many decades.

        Values that are not finite are left out; those under LOG_FLOOR count as LOG_FLOOR.
        """

    def image(self, name: str, path: str | Path) -> None:
        """A PNG file."""

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """A table; a value that is None or NaN is empty."""

    def summary(self, values: dict[str, Any]) -> None:
        """The run's results, by the keys of summary.json."""

    def artifact(self, path: str | Path, name: str, type: str) -> None:
        """A finished file as artifact. Offline it is not copied: keep it in place until `wandb sync`."""

    def state(self) -> dict[str, Any]:
        """What `start` needs to go on with the same copy later, as plain data: its "id", if there is one."""
        return {}

    def finish(self, failed: bool = False) -> None:
        """End the copy. Call it in `finally`; a second call does nothing."""


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """The method, with whatever it raises turned into the tracker's one warning."""

    @functools.wraps(method)
    def call(self: "WandbTracker", *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # W&B may raise anything, and none of it is worth a training run
            self._complain(method.__name__, error)

    return call


class WandbTracker(Tracker):
    """Copies records to one W&B run, which it owns.

    run: what `wandb.init` returned. warned: whether the run's one warning was given already. rows_there: how many rows of a run
    that goes on W&B has already; that many are counted and not sent.
    """

    def __init__(self, run: Any, *, warned: bool = False, rows_there: int = 0) -> None:
        self._run = run
        self._warned = warned
        self._rows, self._rows_there = 0, run.step if run.resumed else rows_there
        self._finished = False
        self._step = 0
        self._defined: set[str] = set()
        self._removed: list[list[Any]] = []
        self._offline = run.offline
        self._directory = str(Path(run.dir).parent)
        self.where = self._directory if run.offline else run.url

    @_guarded
    def log(self, record: dict[str, Any]) -> None:
        self._step = record["step"]
        self._send({key: value for key, value in record.items() if value is not None})

    @_guarded
    def event(self, record: dict[str, Any]) -> None:
        self._step = record["step"]
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
        numbers |= {f"requested_{key}": value for key, value in record.get("requested", {}).items()}
        self._send({_event_key(key): value for key, value in numbers.items()})
        for group in record.get("groups", []):
            removed = group["removed"]
            scores = group.get("removed_scores") or [None] * len(removed)
            rows = zip(removed, scores, strict=True)
            self._removed += [[self._step, group["name"], neuron, score] for neuron, score in rows]

    @_guarded
    def histogram(self, name: str, values: Iterable[float], step: int) -> None:
        import wandb

        self._step = step
        logs = [math.log10(max(float(value), LOG_FLOOR)) for value in values if math.isfinite(value)]
        if logs:
            self._send({f"log10_{name}": wandb.Histogram(logs), "step": step})

    @_guarded
    def image(self, name: str, path: str | Path) -> None:
        import wandb

        self._send({name: wandb.Image(str(path)), "step": self._step})

    @_guarded
    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        import wandb

        data = [[None if value != value else value for value in row] for row in rows]
        self._send({name: wandb.Table(columns=columns, data=data, allow_mixed_types=True), "step": self._step})

    @_guarded
    def summary(self, values: dict[str, Any]) -> None:
        self._run.summary.update(values)

    @_guarded
    def artifact(self, path: str | Path, name: str, type: str) -> None:
        import wandb

        artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", name), type=type)
        # "immutable" uploads the file from where it is; the default keeps a copy of it in the home directory.
        artifact.add_file(str(Path(path).absolute()), policy="immutable")
        self._run.log_artifact(artifact)

    def state(self) -> dict[str, Any]:
        return {"id": self._run.id}

    @_guarded
    def finish(self, failed: bool = False) -> None:
        if self._finished:
            return
        self._finished = True
        try:
            self._send_removed()
        finally:
            self._run.finish(exit_code=1 if failed else 0)

    def _send_removed(self) -> None:
        """All rows as one table; logged at each event, W&B would keep every growing version of it."""
        if self._removed:
            import wandb

            table = wandb.Table(columns=REMOVED_COLUMNS, data=self._removed)
            self._send({"removed_neurons": table, "step": self._step})

    def _send(self, values: dict[str, Any]) -> None:
        """Log one row, if W&B lacks it. W&B's own step counts rows; ours is a value in it, so no row is too late for W&B."""
        for key in values.keys() - self._defined - {"step"}:
            pruned = key.startswith("pruned/") and key != PRUNED_AXIS
            self._run.define_metric(key, step_metric=PRUNED_AXIS if pruned else "step")
            self._defined.add(key)
        self._rows += 1
        if self._rows > self._rows_there:
            self._run.log(values, step=self._rows - 1, commit=True)

    def _complain(self, doing: str, error: Exception) -> None:
        _logger.log(
            logging.DEBUG if self._warned else logging.WARNING,
            "W&B failed in %s (%s). The run goes on and its own directory stays complete. "
            "What W&B did get is uploaded by `wandb sync %s`; tracking.mode=%s.",
            doing,
            _brief(error),
            self._directory if self._offline else f"--include-online {self._directory}",
            "disabled does without W&B" if self._offline else "offline needs no server",
        )
        self._warned = True


def start(
    mode: str,
    *,
    directory: str | Path,
    project: str,
    entity: str | None,
    group: str,
    job_type: str,
    name: str,
    tags: Iterable[str],
    config: dict[str, Any],
    resumed: dict[str, Any] | None = None,
) -> Tracker:
    """Begin the W&B copy of one run; never raises because of W&B.

    mode: "offline", "online" or "disabled" (the head of this module tells what WANDB_MODE does to it).
    directory: the run directory; W&B writes into its subdirectory wandb. group: the study. config: the
    resolved config, nested; it is passed on as it is, and nothing of the environment is added. An online run
    without credentials, or without a server that answers within INIT_SECONDS, is recorded offline.

    resumed: the `Tracker.state` of this run's copy so far, to go on with it under its id. Every row is to be told again, in
    the old order, and W&B gets those that it lacks: the server, or else the files of the parts so far, say which it has.
    Offline there is a second folder then; `wandb sync` of all of them, the oldest first, makes one run. Where an online run
    must go on offline, it becomes a run of its own there, with all rows.

    ValueError for another mode.
    """
    mode = effective_mode(mode)
    if mode == "disabled":
        return Tracker()
    options = dict(dir=str(Path(directory).absolute()), project=project, entity=entity, group=group)
    options |= dict(job_type=job_type, name=name, tags=list(tags) or None, config=config)
    options["id"] = (resumed or {}).get("id") or secrets.token_hex(4)
    there = _rows_in_files(Path(directory), options["id"]) if resumed else 0
    errors = []
    for attempt in ("online", "offline") if mode == "online" else ("offline",):
        try:
            tracker = WandbTracker(_init(attempt, options), warned=bool(errors), rows_there=there)
        except Exception as error:  # a missing package or key, a dead server, a full disk: never fatal
            errors.append(_brief(error))
            options["id"], there = secrets.token_hex(4), 0  # W&B's process holds the failed attempt's id
            continue
        if errors:
            _logger.warning(
                "W&B could not start online (%s). The run goes on and is recorded offline: "
                "`wandb sync %s` uploads it; tracking.mode=offline skips the attempt.",
                errors[0],
                tracker.where,
            )
        return tracker
    _logger.warning(
        "W&B could not start (%s). The run goes on without it and its own directory %s stays complete. "
        "`pip install wandb` if it is missing; tracking.mode=offline needs no server, then `wandb sync DIR` "
        "uploads; tracking.mode=disabled does without W&B.",
        "; then offline: ".join(errors),
        directory,
    )
    return Tracker()


def fetch(project: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, config and summary of every run that a W&B server has of ENTITY/PROJECT; not those of job type "summary".

    WANDB_BASE_URL and WANDB_API_KEY (or `wandb login`) say where. Raises TrackingError where it can't be read.
    """
    try:
        import wandb

        for run in wandb.Api(timeout=FETCH_SECONDS).runs(project, lazy=False):  # lazy asks for each run's config anew
            if run.job_type != "summary":
                yield run.name, dict(run.config), dict(run.summary)
    except Exception as error:  # W&B may raise anything
        raise TrackingError(
            f"the runs of {project} can't be read from W&B ({_brief(error)}): check ENTITY/PROJECT, `wandb login` and WANDB_BASE_URL"
        ) from error


def effective_mode(mode: str) -> str:
    """The more private one of `mode` and WANDB_MODE. ValueError when `mode` is none of MODES."""
    if mode not in MODES:
        raise ValueError(f"tracking.mode is {mode!r}; choose one of {', '.join(MODES)}")
    wish = os.environ.get("WANDB_MODE", "").lower()
    wish = "offline" if wish == "dryrun" else wish  # its name in old versions of W&B
    return min(mode, wish, key=MODES.index) if wish in MODES else mode


def _init(mode: str, options: dict[str, Any]) -> Any:
    """A new W&B run, set up for many short ones: silent, and without what environment.json holds already."""
    # W&B reports on its own use to its makers and looks up their host for that, offline too.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    # For what W&B says outside a run. It asks for a missing key only where it may show information: not here.
    wandb.setup(settings=wandb.Settings(quiet=True, show_info=False))
    settings = wandb.Settings(
        silent=True,  # W&B still says so when a server refuses an online run's data
        # Offline there is no server to wait for, only W&B's own process, which a busy machine may start late.
        **({"init_timeout": INIT_SECONDS} if mode == "online" else {}),
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
        console="off",  # no hooks on stdout and stderr
        disable_git=True,  # environment.json has the commit; a diff of uncommitted work stays private
        disable_code=True,
        save_code=False,
        x_disable_stats=True,  # CPU and GPU load every 15 s tells little about short runs and takes a process
        x_save_requirements=False,
    )
    # "create_new": a run that anyone else in this process left open is neither joined nor ended.
    resume = "allow" if mode == "online" else None  # offline W&B can't
    return wandb.init(mode=mode, resume=resume, reinit="create_new", settings=settings, **options)


def _rows_in_files(directory: Path, identity: str) -> int:
    """How many rows of the run W&B's files in the run directory hold; what they have is on the server, or gets there by sync."""
    try:
        from wandb.proto.wandb_internal_pb2 import Record

        files = (directory / "wandb").glob(f"*-{identity}/run-{identity}.wandb")
        records = (Record.FromString(packed) for file in files for packed in packed_records(file))
        return sum(record.WhichOneof("record_type") == "history" for record in records)
    except Exception as error:  # a format that is not known: rows may be there twice
        _logger.warning("W&B's files in %s can't be read (%s): rows may be sent again", directory, _brief(error))
        return 0


def _event_key(key: str) -> str:
    if key in ("step", "epoch"):
        return key
    return "pruned/accuracy" if key == "accuracy_after" else f"pruned/{key}"


def _brief(error: Exception) -> str:
    """The error's type and first line; W&B's messages go on for several."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
