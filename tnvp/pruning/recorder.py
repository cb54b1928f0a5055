"""Hooks that feed moments while the network runs, and the trace they leave.

A signal is what is watched at one layer: ``(layer, "out")`` is a producer's own output (pre-activation), ``(layer, "in")``
what a consumer reads (activation), whatever the code does in between. Shapes: N neurons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .attention import explicit_attention
from .channels import NeuronGroup
from .errors import PruningError
from .layers import channel_dim, layer_input
from .moments import DecayingMoments, Moments, as_samples

Signal = tuple[str, str]
WINDOWS = ("cumulative", "since_prune", "ema")


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

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor | None = None) -> None:
        x = output if self.signal[1] == "out" else layer_input(args, kwargs)
        self.recorder.observe(self.signal, x, channel_dim(module, x))

    def __deepcopy__(self, memo) -> object:
        return dead_hook

    def __reduce__(self):
        return _bury, ()


def dead_hook(*_) -> None:
    """What is left of a recording hook in a copy of the model."""


def _bury():
    return dead_hook


class Recorder:
    """Moments of the signals of ``groups``, over the current window and over all that scores look at.

    ``kinds`` are the signals to watch: "activation", "preactivation" or both. ``window`` says what a score looks at:
    "cumulative" (since the start), "since_prune", or "ema" (exponentially weighted over batches).
    """

    def __init__(
        self, model: nn.Module, groups: Iterable[NeuronGroup], kinds: Iterable[str], window: str = "cumulative"
    ):
        if window not in WINDOWS:
            raise PruningError(f"unknown window {window!r}: choose one of {', '.join(WINDOWS)}")
        self.model, self.window, self.kinds = model, window, tuple(kinds)
        self.groups = [group for group in groups if group.prunable]
        self.ids = {group.name: torch.arange(group.size) for group in self.groups}
        self.trace: list[TraceRow] = []
        self.batches = 0
        self._recording = self._paused = False
        self._current: dict[Signal, Moments] = {}
        self._total: dict[Signal, Moments] = {}
        for group in self.groups:
            for signal in self.signals(group):
                self._current[signal] = Moments()
                self._total[signal] = self._empty()

    def _empty(self) -> Moments:
        return DecayingMoments() if self.window == "ema" else Moments()

    def signals(self, group: NeuronGroup) -> list[Signal]:
        """The signals watched for this group."""
        written = [(name, "out") for name in group.producers if "preactivation" in self.kinds]
        read = [(name, "in") for name in group.consumers if "activation" in self.kinds]
        return written + read

    @contextmanager
    def record(self) -> Iterator[None]:
        """Hooks live inside this block only, also when it ends by an error."""
        if self._recording:
            raise PruningError("already recording: record() blocks can't be nested")
        modules = dict(self.model.named_modules())
        handles = []
        self._recording = True
        try:
            for signal in self._current:
                module = modules[signal[0]]
                register = module.register_forward_hook if signal[1] == "out" else module.register_forward_pre_hook
                handles.append(register(_Hook(self, signal), with_kwargs=True))
            with explicit_attention(self.model):
                yield
        finally:
            self._recording = False
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

    @torch.compiler.disable
    def observe(self, signal: Signal, x: Tensor, channel: int) -> None:
        samples = as_samples(x.detach(), channel)
        if self._paused or samples.shape[0] == 0:
            return
        with torch.no_grad():
            batch = Moments.of(samples)
            self._current[signal].merge(batch)
            if self.window == "ema":
                self._total[signal].merge(batch)
        if signal == next(iter(self._current)):
            self.batches += 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded yet, or since the last `forget`."""
        return all(self.moments(signal).count == 0 for signal in self._current)

    def moments(self, signal: Signal) -> Moments:
        """All that a score may look at: the closed windows and the open one."""
        if self.window == "ema":
            return self._total[signal]
        merged = Moments()
        merged.merge(self._total[signal])
        merged.merge(self._current[signal])
        return merged

    def neuron_moments(self, group: NeuronGroup, kind: str) -> Moments | None:
        """Per-neuron moments [N] of "activation" (at the first consumer) or "preactivation" (at the first producer)."""
        signal = self._signal(group, kind)
        if signal not in self._current:
            return None
        return self._pooled(group, signal, self.moments(signal))

    def _signal(self, group: NeuronGroup, kind: str) -> Signal:
        return (group.consumers[0], "in") if kind == "activation" else (group.producers[0], "out")

    def _pooled(self, group: NeuronGroup, signal: Signal, moments: Moments) -> Moments:
        moments.require_finite(signal[0])
        return moments.pool(group.maps[signal], group.size)

    def close_window(self, step: int) -> None:
        """End the recording window: its moments become trace rows. A window of fewer than two samples stays open."""
        if all(m.count < 2 for m in self._current.values()):
            return
        kind = self.kinds[0]
        for group in self.groups:
            signal = self._signal(group, kind)
            pooled = self._pooled(group, signal, self._current[signal])
            if pooled.count > 1:
                row = TraceRow(
                    step, group.name, self.ids[group.name], pooled.mean.cpu(), pooled.variance.cpu(), pooled.count
                )
                self.trace.append(row)
        for signal, moments in self._current.items():
            if self.window != "ema":
                self._total[signal].merge(moments)
            self._current[signal] = Moments()

    def forget(self) -> None:
        """Start all moments anew; the trace stays."""
        for signal in self._current:
            self._current[signal], self._total[signal] = Moments(), self._empty()

    def select(self, kept: dict[str, Tensor], cuts: dict[Signal, Tensor]) -> None:
        """Follow a prune event: ``kept[group]`` neurons and ``cuts[layer, side]`` positions stay."""
        for name, index in kept.items():
            self.ids[name] = self.ids[name][index]
        for signal, index in cuts.items():
            if signal in self._current:
                self._current[signal] = self._current[signal].select(index)
                self._total[signal] = self._total[signal].select(index)
        if self.window == "since_prune":
            self.forget()
