"""Hooks that feed moments while the network runs, and the trace they leave.

A signal is what is watched at one layer: ``(layer, "out")`` is a producer's own output (pre-activation), ``(layer, "in")``
what a consumer reads (activation), whatever the code does in between. Of a signal, one or more quantities are kept: its
"value"; "nonzero", 1 where it is not 0; "taylor", the value times the gradient that the backward pass brings.
Shapes: N neurons, P positions of a layer's dimension, L locations of a feature, U = P/L.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .attention import explicit_attention
from .channels import NeuronGroup
from .errors import PruningError, damaged
from .layers import ATTENTION, channel_dim, kind_of, layer_input, tensor_of
from .moments import DecayingMoments, Moments
from .ranks import gathered, several

Signal = tuple[str, str]  # (layer, "in" or "out")
Stream = tuple[str, str, str]  # a signal and the quantity that is kept of it
WINDOWS = ("cumulative", "since_prune", "ema")
TOTALS = {"cumulative": Moments, "since_prune": Moments, "ema": DecayingMoments}
EVERYTHING = ("activation", "preactivation", "nonzero", "taylor")  # but the covariance, which is calibrated
LARGEST_COVARIANCE = 4096  # rows; beyond them, 134 MB in float64, features are taken together with all their locations


class TraceRow(NamedTuple):
    """One group's moments over one recording window; neurons keep the id they were born with."""

    step: int
    group: str
    neuron: Tensor  # [N] ids, int64
    mean: Tensor  # [N]
    variance: Tensor  # [N], unbiased
    count: int  # samples a neuron


class _Hook:
    """A recording hook that a copy of the model leaves behind: copied or pickled, it is dead."""

    def __init__(self, recorder: Recorder, signal: Signal):
        self.recorder, self.signal = recorder, signal
        # No decorator: it would load torch's compiler, seconds long, with the module.
        self.observe = torch.compiler.disable(recorder.observe)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor | None = None) -> None:
        x = output if self.signal[1] == "out" else tensor_of(layer_input(args, kwargs))
        self.observe(self.signal, x, channel_dim(module, x))

    def __deepcopy__(self, memo) -> object:
        return dead_hook

    def __reduce__(self):
        return _bury, ()


class _Sight(_Hook):
    """Keeps what the network was first called with."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.recorder.seen is None and not kwargs:
            self.recorder.seen = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)


def dead_hook(*_) -> None:
    """What is left of a recording hook in a copy of the model."""


def _bury():
    return dead_hook


def _forget_compiled_code() -> None:
    """Code that torch.compile made before would go on without the new hooks: it does not look whether there are any."""
    if torch._dynamo.utils.counters["frames"]:
        torch.compiler.reset()


class Recorder:
    """Moments of the signals of ``groups``, over the current window and over all that scores look at.

    ``kinds`` is what to watch: "activation", "preactivation", and of the activation also "nonzero", "taylor" or
    "covariance". ``window`` says what a score looks at: "cumulative" (since the start), "since_prune", or "ema"
    (exponentially weighted over batches). ``wide`` also keeps what all other kinds and windows would have, so that a recorder
    of any of them can `restore` its `state`.

    On several ranks each sees its part of the batches, and ``_mine`` holds what it saw since the last `exchange`, which
    merges all ranks' parts: everything else here is of all ranks, and the same on each.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[NeuronGroup],
        kinds: Iterable[str],
        window: str = "cumulative",
        wide: bool = False,
        ranks: dist.ProcessGroup | None = None,
    ):
        if window not in WINDOWS:
            raise PruningError(f"unknown window {window!r}: choose one of {', '.join(WINDOWS)}")
        self.model, self.window, self.kinds, self.ranks = model, window, tuple(kinds), ranks
        self.wide = wide
        self.watched = tuple(dict.fromkeys((*self.kinds, *EVERYTHING))) if wide else self.kinds
        self._windows = WINDOWS if wide else (window,)
        self._traced = "preactivation" if self.kinds[:1] == ("preactivation",) else "activation"
        traced = ("activation", "preactivation") if wide else (self._traced,)
        self._traces: dict[str, list[TraceRow]] = {kind: [] for kind in traced}
        self.groups = [group for group in groups if group.prunable]
        self.ids = {group.name: torch.arange(group.size) for group in self.groups}
        self.batches = 0
        self.wants_inputs, self.seen = (
            False,
            None,
        )  # whether to keep what the first forward pass is called with, and that
        self._paused = False
        self._block: object | None = None  # the open record() block, anew after each prune event
        self._correlates = True
        self._signals = list(dict.fromkeys(signal for group in self.groups for signal in self.signals(group)))
        self.forget()

    @property
    def trace(self) -> list[TraceRow]:
        """One row per group and closed window."""
        return self._traces[self._traced]

    def take_trace(self) -> list[TraceRow]:
        """The rows of `trace`, which begins anew."""
        rows = self.trace
        self._traces = {kind: [] for kind in self._traces}
        return rows

    def signals(self, group: NeuronGroup) -> list[Signal]:
        """The signals watched for this group."""
        written = self.written(group) if "preactivation" in self.watched else []
        read = [(name, "in") for name in group.consumers if any(kind != "preactivation" for kind in self.watched)]
        return written + read

    def written(self, group: NeuronGroup) -> list[Signal]:
        """Where a group's pre-activations are seen: at its producers; what heads of attention give, at their out-projection."""
        kinds = {name: kind_of(self.model.get_submodule(name)) for name in group.producers}
        return [(f"{n}.out_proj", "in") if kind is ATTENTION else (n, "out") for n, kind in kinds.items()]

    def _streams(self, signal: Signal) -> list[Stream]:
        more = [quantity for quantity in ("nonzero", "taylor") if quantity in self.watched and signal[1] == "in"]
        return [(*signal, quantity) for quantity in ("value", *more)]

    @contextmanager
    def record(self, covariance: bool = True) -> Iterator[None]:
        """Hooks live inside this block only, also when it ends by an error.

        ``covariance=False`` leaves the covariance out, which costs most, although it is among the kinds.
        """
        if self._block is not None:
            raise PruningError("already recording: record() blocks can't be nested")
        modules = dict(self.model.named_modules())
        handles = []
        self._block, self._correlates = object(), covariance
        _forget_compiled_code()
        try:
            for signal in self._signals:
                module = modules[signal[0]]
                register = module.register_forward_hook if signal[1] == "out" else module.register_forward_pre_hook
                handles.append(register(_Hook(self, signal), with_kwargs=True))
            if self.wants_inputs:
                handles.append(self.model.register_forward_pre_hook(_Sight(self, ("", "")), with_kwargs=True))
            with explicit_attention(self.model):
                yield
        finally:
            self._block = None
            for handle in handles:
                handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is recorded inside, whatever runs."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def observe(self, signal: Signal, x: Tensor, channel: int) -> None:
        if self._paused or (x.numel() == 0 and not several(self.ranks)):  # an empty part belongs to others' batch
            return
        with torch.no_grad():
            seen, wide = x.detach(), self._covariance_stream(signal)
            batch = Moments.of(seen, channel) if wide is None else Moments.of(seen, channel, True, wide.locations)
            self._merge((*signal, "value"), batch)
            if wide is not None:
                self._merge((*signal, "covariance"), batch)
            if (*signal, "nonzero") in self._current:
                self._merge((*signal, "nonzero"), Moments.of((seen != 0).float(), channel))
        if (*signal, "taylor") in self._current and x.requires_grad and torch.is_grad_enabled():
            x.register_hook(self._gradient_hook(signal, x.detach(), channel))
        if signal == self._signals[0]:
            self.batches += 1

    def _merge(self, stream: Stream, batch: Moments) -> None:
        """Count a batch, or this rank's part of one, which waits for the others' parts."""
        if not several(self.ranks):
            return self._add(stream, batch)
        waiting, covariance = self._mine.setdefault(stream, []), stream[2] == "covariance"
        if not waiting or "ema" in self._windows:  # decay counts batches, so each part waits by itself
            waiting.append(Moments(covariance, batch.locations))
        waiting[-1].merge(batch)

    def _add(self, stream: Stream, batch: Moments) -> None:
        """Count a whole batch."""
        if stream[2] == "covariance":
            return self._covariances[stream[:2]].merge(batch)
        self._current[stream].merge(batch)
        if "ema" in self._totals:
            self._totals["ema"][stream].merge(batch)

    def exchange(self) -> None:
        """Merge what the ranks saw since the last time, part by part in rank order. All ranks must call it."""
        if not several(self.ranks):
            return
        device = next(self.model.parameters()).device
        mine = {stream: [_on("cpu", vars(part)) for part in parts] for stream, parts in self._mine.items()}
        found = gathered((self.batches, mine), self.ranks)
        self._mine, self.batches = {}, max(batches for batches, _ in found)
        for stream in dict.fromkeys(stream for _, theirs in found for stream in theirs):
            for parts in zip_longest(*(theirs.get(stream, []) for _, theirs in found)):
                self._add(stream, self._whole(stream, [_moments(Moments, part, device) for part in parts if part]))

    def _whole(self, stream: Stream, parts: list[Moments]) -> Moments:
        """The batch that the ranks' ``parts`` make up. The loss of all is the mean of the ranks' losses, and so are gradients."""
        whole, signal = Moments(stream[2] == "covariance", parts[0].locations), stream[:2]
        for part in parts:
            whole.merge(part)
        if stream[2] == "taylor" and whole.count:
            ranks = dist.get_world_size(self.ranks)
            whole.mean, whole._m2 = whole.mean / ranks, whole._m2 / ranks**2
        if whole.tracks_covariance and signal not in self._covariances:  # where this rank saw no part of it
            self._covariances[signal] = TOTALS[self.window](covariance=True, locations=whole.locations)
        return whole

    def _gradient_hook(self, signal: Signal, x: Tensor, channel: int) -> Callable[[Tensor], None]:
        """What to do when the gradient of ``x`` comes, if the block it was read in is still open."""
        block = self._block

        @torch.no_grad()
        def hook(gradient: Tensor) -> None:
            if self._block is not block:
                return
            product = x.to(torch.promote_types(x.dtype, torch.float32)) * gradient
            # A GradScaler's first steps overflow and are skipped: they don't count here either.
            product = torch.where(product.isfinite().all(), product, torch.zeros_like(product))
            self._merge((*signal, "taylor"), Moments.of(product, channel))

        return hook

    def _covariance_stream(self, signal: Signal) -> Moments | None:
        if signal[1] == "out" or "covariance" not in self.kinds or not self._correlates:
            return None
        if signal not in self._covariances and (locations := self._locations(signal[0])) is not None:
            self._covariances[signal] = TOTALS[self.window](covariance=True, locations=locations)
        return self._covariances.get(signal)

    def _locations(self, layer: str) -> int | None:
        """L for which [P/L, P/L] is small enough: 1 or, where neurons own runs of positions, what divides each run."""
        owners = torch.stack([group.maps[layer, "in"] for group in self.groups if (layer, "in") in group.maps])
        positions = owners.shape[1]
        if positions <= LARGEST_COVARIANCE:
            return 1
        starts = (owners.diff(dim=1) != 0).any(0).nonzero().flatten() + 1
        locations = math.gcd(positions, *starts.tolist())
        return locations if positions // locations <= LARGEST_COVARIANCE else None

    @property
    def is_recording(self) -> bool:
        """Whether a `record` block is open."""
        return self._block is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded yet, or since the last `forget`."""
        return all(self.moments(signal).count == 0 for signal in self._signals)

    def moments(self, signal: Signal, quantity: str = "value") -> Moments:
        """All that a score may look at: the closed windows and the open one."""
        stream = (*signal, quantity)
        if self.window == "ema":
            return self._totals["ema"][stream]
        merged = Moments()
        merged.merge(self._totals[self.window][stream])
        merged.merge(self._current[stream])
        return merged

    def checked(self, signal: Signal, quantity: str = "value") -> Moments | None:
        """The same, None where it isn't watched. Raises where it holds a NaN or Inf."""
        if (*signal, quantity) not in self._current:
            return None
        moments = self.moments(signal, quantity)
        moments.require_finite(signal[0])
        return moments

    def covariance(self, layer: str) -> tuple[Tensor, int] | None:
        """Unbiased covariance [U, U] in float64 of what a consumer reads, and L; None where both P and U are too large.

        L = 1 up to `LARGEST_COVARIANCE` positions P: feature by feature. Beyond, where every neuron owns runs of L
        positions, as the channels of a flattened [C, H, W] do: within locations, each feature centred by its own mean.
        """
        moments = self._covariances.get((layer, "in"))
        if moments is None and self._locations(layer) is None:
            return None
        count = moments.count if moments is not None else 0
        if count < 2:
            raise PruningError(
                f"{count} samples of the covariance at {layer!r} were recorded and it needs at least 2: run your loop "
                "inside `with pruner.record():`, or pass prune(calibration=…)"
            )
        self._require_whole(layer, count)
        moments.require_finite(layer)
        return moments.covariance, moments.locations

    def _require_whole(self, layer: str, count: int) -> None:
        """A covariance of some batches and a mean of more would tell of two networks."""
        whole = self.moments((layer, "in")).count
        if count < whole:
            raise PruningError(
                f"the covariance at {layer!r} was recorded of {count} of {whole} samples: a state restored lacks those of the "
                "others, or record(covariance=False) left them out; pass prune(calibration=…)"
            )

    def neuron_moments(self, group: NeuronGroup, kind: str) -> Moments | None:
        """Per-neuron moments [N] of "activation" or "preactivation", each neuron's at the first layer that has it."""
        return self._per_neuron(group, kind, self.checked)

    def _per_neuron(
        self, group: NeuronGroup, kind: str, moments_of: Callable[[Signal], Moments | None]
    ) -> Moments | None:
        """A layer that a concatenation feeds may read some of the neurons only: the next ones tell about the others."""
        read = [(name, "in") for name in group.consumers]
        missing = torch.ones(group.size, dtype=torch.bool)
        parts = []
        for signal in read if kind == "activation" else self.written(group):
            neuron, moments = group.maps[signal], moments_of(signal)
            if moments is None:
                return None
            if moments.count:
                mine = torch.where((neuron >= 0) & missing[neuron], neuron, -1)
                parts.append((moments, mine))
                missing[mine[mine >= 0]] = False
        return Moments.pooled(parts, group.size)

    def _of_window(self, signal: Signal) -> Moments:
        moments = self._current[*signal, "value"]
        moments.require_finite(signal[0])
        return moments

    def close_window(self, step: int) -> None:
        """End the recording window: its moments become trace rows. A window of fewer than two samples stays open."""
        self.exchange()
        if all(self._current[*signal, "value"].count < 2 for signal in self._signals):
            return
        for kind, rows in self._traces.items():
            for group in self.groups:
                pooled = self._per_neuron(group, kind, self._of_window)
                if pooled.count > 1:
                    mean, variance = pooled.mean.cpu(), pooled.variance.cpu()
                    rows.append(TraceRow(step, group.name, self.ids[group.name], mean, variance, pooled.count))
        for stream, moments in self._current.items():
            for window, total in self._totals.items():
                if window != "ema":
                    total[stream].merge(moments)
            self._current[stream] = Moments()

    def forget(self) -> None:
        """Start all moments anew; the trace stays."""
        streams = [stream for signal in self._signals for stream in self._streams(signal)]
        self._current: dict[Stream, Moments] = {stream: Moments() for stream in streams}
        self._totals = {window: {stream: TOTALS[window]() for stream in streams} for window in self._windows}
        self._covariances: dict[Signal, Moments] = {}  # over all that scores look at; windows hold none
        self._mine: dict[Stream, list[Moments]] = {}

    def select(self, kept: dict[str, Tensor], cuts: dict[Signal, Tensor]) -> None:
        """Follow a prune event: ``kept[group]`` neurons and ``cuts[layer, side]`` positions stay.

        Gradients of a forward pass from before the event are not recorded any more.
        """
        for name, index in kept.items():
            self.ids[name] = self.ids[name][index]
        for table in (self._current, *self._totals.values(), self._covariances):
            for key in table:
                if key[:2] in cuts:
                    table[key] = table[key].select(cuts[key[:2]])
        if self._block is not None:
            self._block = object()
        if self.window == "since_prune":
            self.forget()

    def state(self) -> dict:
        """All that was recorded, as plain data and tensors."""
        self.exchange()
        return {
            "batches": self.batches,
            "ids": dict(self.ids),
            "traces": {kind: [tuple(row) for row in rows] for kind, rows in self._traces.items()},
            "current": _plain(self._current),
            "totals": {window: _plain(total) for window, total in self._totals.items()},
            "covariances": _plain(self._covariances),
        }

    def restore(
        self, state: dict, ids: dict[str, Tensor] | None = None, cuts: dict[Signal, Tensor] | None = None
    ) -> None:
        """Go on from a copy of the `state` of a recorder of this network; what is not watched here is left out.

        The network is as it is now or, given ``ids`` and ``cuts``, as it will be once these neurons and positions alone stay.
        Raises PruningError where it was of other groups, is damaged or lacks what is watched here; this recorder is of no use then.
        """
        device = next(self.model.parameters()).device
        sizes = {signal: self._positions(signal, cuts or {}) for signal in self._signals}

        def read(kind: type[Moments], table: dict) -> dict[Stream, Moments]:
            return {stream: kind.restored(table[stream], sizes[stream[:2]], device) for stream in self._current}

        try:
            self._traces = {kind: [_row(row) for row in state["traces"][kind]] for kind in self._traces}
            self._totals = {window: read(TOTALS[window], state["totals"][window]) for window in self._totals}
            self._current = read(Moments, state["current"])
            found = state["covariances"] if "covariance" in self.kinds else {}
            kind = TOTALS[self.window]
            self._covariances = {signal: kind.restored(v, sizes[signal], device) for signal, v in found.items()}
            self._restore_ids(state["ids"], ids or self.ids)
            self.batches = state["batches"]
        except KeyError as error:
            raise PruningError(f"what was recorded does not fit this recorder: it lacks {error}") from error
        except (AttributeError, TypeError) as error:
            raise damaged(f"what was recorded can't be read ({error})") from error
        if type(self.batches) is not int or self.batches < 0:
            raise damaged(f"it counts {self.batches!r} batches")

    def _positions(self, signal: Signal, cuts: dict[Signal, Tensor]) -> int:
        """P of a layer's dimension, after the ``cuts``."""
        return len(cuts.get(signal, next(group.maps[signal] for group in self.groups if signal in group.maps)))

    def _restore_ids(self, found: dict[str, Tensor], ids: dict[str, Tensor]) -> None:
        for name, expected in ids.items():
            if not torch.equal(found[name].cpu(), expected):
                raise damaged(
                    f"what was recorded is of the neurons {found[name].tolist()} of group {name!r}, and others are left"
                )
        self.ids = {name: index.clone() for name, index in ids.items()}


def _row(values: tuple) -> TraceRow:
    row = TraceRow(*values)
    if not row.neuron.shape == row.mean.shape == row.variance.shape:
        raise damaged(f"the trace of group {row.group!r} at step {row.step!r} has columns of several lengths")
    return row


def _plain(table: dict) -> dict:
    return {key: dict(vars(moments)) for key, moments in table.items()}


def _moments(kind: type[Moments], values: dict, device: torch.device) -> Moments:
    new = kind()
    vars(new).update(_on(device, values))
    return new


def _on(device: torch.device | str, values: dict) -> dict:
    return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in values.items()}
