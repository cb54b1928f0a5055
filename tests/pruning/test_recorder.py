"""The laws of recording: it changes nothing, leaves nothing behind, and neurons keep their names."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import tnvp
from tnvp.pruning import recorder as recorders
from tnvp.pruning.errors import PruningError
from tnvp.pruning.recorder import Recorder

from .networks import convnet, mlp, stir

X = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
BOTH = ("activation", "preactivation")


def recorder_of(model: nn.Module, x=X, kinds=BOTH, window: str = "cumulative") -> Recorder:
    return Recorder(model, tnvp.explain(model, x), kinds, window)


def run(recorder: Recorder, *batches: torch.Tensor) -> None:
    with recorder.record(), torch.no_grad():
        for x in batches:
            recorder.model(x)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def batch(i: int, *shape: int) -> torch.Tensor:
    return torch.randn(6, *(shape or (7,)), generator=torch.Generator().manual_seed(i))


# ==== Watching changes nothing ====


EVERYTHING = (*BOTH, "nonzero", "taylor", "covariance")


@pytest.mark.parametrize("kinds", [BOTH, EVERYTHING], ids=["moments", "everything"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("network", ["mlp", "convnet"])
def test_the_forward_and_its_gradients_are_the_same_bit_for_bit(network, dtype, training, kinds):
    torch.manual_seed(1)
    model = mlp(norm=True, dropout=0.4) if network == "mlp" else stir(convnet())
    x = batch(0) if network == "mlp" else batch(0, 3, 16, 16)
    model, x = model.to(dtype).train(training), x.to(dtype)
    twin = copy.deepcopy(model)
    torch.manual_seed(2)
    expected = twin(x)
    expected.sum().backward()
    recorder = recorder_of(model, x, kinds)
    torch.manual_seed(2)
    with recorder.record():
        found = model(x)
        found.sum().backward()
    assert recorder.batches == 1
    assert torch.equal(found, expected)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)


class Keywords(nn.Module):
    """Calls its layers with their input as a keyword."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.b(input=self.a(input=x).relu())


def test_a_layer_called_with_a_keyword_is_watched_too():
    model = Keywords()
    recorder = recorder_of(model)
    run(recorder, X)
    torch.testing.assert_close(recorder.moments(("a", "out")).mean.float(), model.a(X).mean(0))
    torch.testing.assert_close(recorder.moments(("b", "in")).mean.float(), model.a(X).relu().mean(0))


def test_keeps_no_graph_and_no_activation_alive():
    model = mlp()
    recorder, seen = recorder_of(model, kinds=EVERYTHING), []
    model[0].register_forward_hook(lambda m, i, output: seen.append(weakref.ref(output)))
    with recorder.record():
        model(X).sum().backward()
        gc.collect()
        assert seen[-1]() is None
    moments = [recorder.moments(signal) for group in recorder.groups for signal in recorder.signals(group)]
    assert moments and not any(m.mean.requires_grad or m.variance.requires_grad for m in moments)


def test_works_in_inference_mode_and_out_of_it_alike():
    model = mlp()
    recorder = recorder_of(model, kinds=EVERYTHING)
    with recorder.record():
        for mode in (torch.inference_mode, torch.enable_grad, torch.inference_mode):
            with mode():
                model(X)
    assert recorder.moments(("0", "out")).count == 3 * len(X)
    torch.testing.assert_close(recorder.moments(("0", "out")).mean.float(), model[0](X).mean(0).detach())


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_compiled_network_is_recorded_and_computes_the_same(compiled_before):
    model = mlp()
    fast = torch.compile(model, backend="eager")
    for other in [mlp(), mlp()] if compiled_before else []:  # code made for an equal network, too
        torch.compile(other, backend="eager")(X)
    if compiled_before:
        fast(X)
    recorder = recorder_of(model, kinds=EVERYTHING)
    with recorder.record():
        found = fast(X)
        assert torch.equal(found, model(X))
        found.sum().backward()
    fast(X)
    assert recorder.moments(("2", "in"), "taylor").count == len(X)
    assert recorder.batches == 2
    assert recorder.moments(("0", "out")).count == 2 * len(X)


# ==== Hooks leave; copies are deaf ====


def test_hooks_live_inside_the_block_only_also_when_it_ends_by_an_error():
    model = mlp()
    recorder = recorder_of(model)
    assert hooks(model) == 0
    with recorder.record():
        assert hooks(model) == 4
    assert hooks(model) == 0
    with pytest.raises(ZeroDivisionError), recorder.record():
        raise ZeroDivisionError
    assert hooks(model) == 0
    run(recorder, X)  # and a block may follow
    assert recorder.batches == 1


def test_hooks_of_the_user_stay():
    model, calls = mlp(), []
    model[0].register_forward_hook(lambda *_: calls.append("out"))
    model[2].register_forward_pre_hook(lambda *_: calls.append("in"))
    recorder = recorder_of(model)
    calls.clear()
    run(recorder, X)
    model(X)
    assert calls == ["out", "in"] * 2


def test_blocks_do_not_nest():
    recorder = recorder_of(mlp())
    with recorder.record(), pytest.raises(PruningError, match="nested"), recorder.record():
        pass
    run(recorder, X)
    assert recorder.batches == 1


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())
def test_a_copy_made_meanwhile_is_not_recorded(duplicate):
    model = mlp()
    recorder = recorder_of(model)
    with recorder.record():
        twin = duplicate(model)
        assert torch.equal(twin(X), model(X))
        assert recorder.batches == 1, "the model's own forward"
    twin(X)
    assert recorder.batches == 1


def test_an_averaged_copy_made_meanwhile_is_not_recorded():
    model = mlp()
    recorder = recorder_of(model)
    with recorder.record():
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged(X)
    assert recorder.batches == 0


# ==== What is seen ====


def test_preactivations_are_what_producers_write_and_activations_what_consumers_read():
    model = mlp(norm=True).eval()
    recorder = recorder_of(model)
    run(recorder, X, batch(1))
    x = torch.cat([X, batch(1)])
    group = recorder.groups[0]
    for kind, expected in (("preactivation", model[0](x)), ("activation", model[:3](x))):
        moments = recorder.neuron_moments(group, kind)
        assert moments.count == 12
        torch.testing.assert_close(moments.mean.float(), expected.mean(0).detach())
        torch.testing.assert_close(moments.variance.float(), expected.var(0).detach())


def test_convolutions_are_averaged_over_batch_and_space_also_behind_flatten():
    model = stir(convnet()).eval()
    x = batch(0, 3, 16, 16)
    recorder = recorder_of(model, x)
    run(recorder, x)
    for group, depth in ((recorder.groups[0], 4), (recorder.groups[1], 8)):
        expected = model[:depth](x).movedim(1, -1).flatten(0, -2).detach()
        moments = recorder.neuron_moments(group, "activation")
        assert moments.count == len(expected)
        torch.testing.assert_close(moments.mean.float(), expected.mean(0))
        torch.testing.assert_close(moments.variance.float(), expected.var(0))


def test_an_unbatched_image_is_one_image():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    x = batch(0, 3, 8, 8)
    recorder = recorder_of(model, x)
    run(recorder, *x)
    torch.testing.assert_close(recorder.moments(("0", "out")).mean.float(), model[0](x).mean((0, 2, 3)).detach())


def test_tokens_are_averaged_over_batch_and_sequence():
    model = mlp()
    x = batch(0, 5, 7)
    recorder = recorder_of(model, x)
    run(recorder, x)
    moments = recorder.neuron_moments(recorder.groups[0], "activation")
    assert moments.count == 30
    torch.testing.assert_close(moments.variance.float(), model[:2](x).flatten(0, 1).var(0).detach())


class Halves(nn.Module):
    """Two layers side by side; one reader sees both, the others a half each, the first of them convolved over space."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)
        self.left, self.right = nn.Conv2d(2, 1, 1), nn.Linear(2, 1)
        self.groups = [
            tnvp.NeuronGroup(
                "ab", ["a", "b"], [], ["left", "right"], 4,
                maps={("a", "out"): torch.tensor([0, 1]), ("b", "out"): torch.tensor([2, 3]),
                      ("left", "in"): torch.tensor([0, 1]), ("right", "in"): torch.tensor([2, 3])},
            )
        ]  # fmt: skip

    def forward(self, x):
        return self.left(self.a(x)).mean((1, 2, 3)) + self.right(self.b(x).mean((2, 3)))[:, 0]


def test_each_neuron_is_told_of_by_the_first_layer_that_has_it():
    model, x = Halves(), batch(0, 3, 4, 4)
    recorder = Recorder(model, model.groups, BOTH)
    run(recorder, x)
    space = [m(x).detach().double().movedim(1, -1).flatten(0, -2) for m in (model.a, model.b)]
    read = recorder.neuron_moments(model.groups[0], "activation")
    assert read.count == len(x), "that of the neurons with fewest samples"
    vectors = model.b(x).detach().double().mean((2, 3))
    torch.testing.assert_close(read.mean, torch.cat([space[0].mean(0), vectors.mean(0)]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(read.variance, torch.cat([space[0].var(0), vectors.var(0)]), rtol=1e-5, atol=1e-6)
    written = recorder.neuron_moments(model.groups[0], "preactivation")
    torch.testing.assert_close(written.variance, torch.cat(space, 1).var(0), rtol=1e-5, atol=1e-6)
    recorder.close_window(1)
    assert torch.equal(recorder.trace[0].variance, read.variance)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_or_inf_is_an_error_that_names_the_layer(bad):
    model = mlp()
    recorder = recorder_of(model)
    poisoned = X.clone()
    poisoned[2, 3] = bad
    run(recorder, poisoned, X)
    for kind, layer in (("preactivation", "0"), ("activation", "2")):
        with pytest.raises(PruningError, match=f"NaN or Inf.* at {layer} "):
            recorder.neuron_moments(recorder.groups[0], kind)


def test_nothing_is_recorded_while_paused():
    recorder = recorder_of(mlp())
    with recorder.record():
        recorder.model(X)
        with recorder.paused():
            recorder.model(X + 100)
        recorder.model(X)
    assert recorder.batches == 2
    assert float(recorder.moments(("0", "out")).mean.abs().max()) < 5


# ==== Zeros, gradients, covariances ====


def test_nonzero_counts_what_is_not_zero():
    model = mlp()
    recorder = recorder_of(model, kinds=("nonzero",))
    run(recorder, X, batch(1))
    h = model[:2](torch.cat([X, batch(1)]))
    torch.testing.assert_close(recorder.moments(("2", "in"), "nonzero").mean.float(), (h != 0).float().mean(0))


def gradient_times_value(model, x, weight=1.0):
    h = model[:2](x)
    (gradient,) = torch.autograd.grad(weight * model[2:](h).square().sum(), h)
    return (h * gradient).detach()


def taylor_sum(recorder: Recorder) -> torch.Tensor:
    moments = recorder.moments(("2", "in"), "taylor")
    return (moments.mean * moments.count).float()


def test_taylor_is_the_value_times_its_gradient_and_adds_up_over_backward_passes():
    model = mlp()
    recorder = recorder_of(model, kinds=("taylor",))
    with recorder.record():
        for x in (X, batch(1)):
            model(x).square().sum().backward()
        with torch.no_grad():
            model(X)
        model(X)  # no backward
    expected = sum(gradient_times_value(model, x).sum(0) for x in (X, batch(1)))
    assert recorder.moments(("2", "in"), "taylor").count == 2 * len(X)
    torch.testing.assert_close(taylor_sum(recorder), expected)
    assert recorder.batches == 4


def test_gradients_come_only_from_passes_of_the_open_block_and_from_before_no_event():
    model = mlp()
    recorder = recorder_of(model, kinds=("taylor",))
    with recorder.record():
        late = model(X).sum()
        with recorder.paused():
            paused = model(X).sum()
        paused.backward()
    late.backward()
    with recorder.record():
        stale = model(X).sum()
        kept = torch.arange(5)
        recorder.select({"0": kept}, {("0", "out"): kept, ("2", "in"): kept})
        stale.backward()
    assert recorder.moments(("2", "in"), "taylor").count == 0


def test_a_step_that_overflowed_counts_for_no_gradient():
    model = mlp()
    recorder = recorder_of(model, kinds=("taylor",))
    with recorder.record():
        (model(X).sum() * float("inf")).backward()
        model(X).square().sum().backward()
    assert recorder.checked(("2", "in"), "taylor") is not None
    torch.testing.assert_close(taylor_sum(recorder), gradient_times_value(model, X).sum(0))


@pytest.mark.parametrize("window", ["cumulative", "since_prune", "ema"])
def test_covariance_of_one_window_is_that_of_what_the_consumer_reads(window):
    model = mlp()
    recorder = recorder_of(model, kinds=("covariance",), window=window)
    batches = (X, batch(1)) if window != "ema" else (X,)
    run(recorder, *batches)
    recorder.close_window(1)
    covariance, locations = recorder.covariance("2")
    assert (covariance.dtype, locations) == (torch.float64, 1)
    expected = torch.cov(model[:2](torch.cat(batches)).detach().double().T)
    torch.testing.assert_close(covariance, expected, rtol=1e-5, atol=1e-6)


def test_every_pixel_that_a_convolution_reads_is_a_sample_of_its_covariance():
    model = stir(convnet()).eval()
    x = batch(0, 3, 16, 16)
    recorder = recorder_of(model, x, kinds=("covariance",))
    run(recorder, x)
    pixels = model[:4](x).movedim(1, -1).flatten(0, -2).detach()
    torch.testing.assert_close(recorder.covariance("4")[0].float(), torch.cov(pixels.T), rtol=1e-4, atol=1e-6)


def within_locations(features: torch.Tensor) -> torch.Tensor:
    """Covariance [C, C] of [B, C, L], each feature centred by its own mean."""
    centred = (features - features.mean(0)).double()
    return torch.einsum("bcl,bdl->cd", centred, centred) / (features[0, 0].numel() * (len(features) - 1))


@pytest.mark.parametrize(("largest", "locations"), [(32, 1), (31, 4), (8, 4), (7, None)])
def test_a_large_flattened_input_is_taken_channel_by_channel_or_not_at_all(monkeypatch, largest, locations):
    monkeypatch.setattr(recorders, "LARGEST_COVARIANCE", largest)
    model = stir(convnet()).eval()
    x = batch(0, 3, 16, 16)
    recorder = recorder_of(model, x, kinds=("covariance",))
    run(recorder, x, x.flip(0) * 2)
    found = recorder.covariance("9")
    assert (found and found[1]) == locations
    if locations:
        read = model[:9](torch.cat([x, x.flip(0) * 2])).detach()
        expected = within_locations(read.unflatten(1, (-1, locations)))
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("largest", [32, 8])
@pytest.mark.parametrize("window", ["cumulative", "ema"])
def test_covariances_follow_a_prune_event(monkeypatch, window, largest):
    monkeypatch.setattr(recorders, "LARGEST_COVARIANCE", largest)
    model = stir(convnet()).eval()
    x = batch(0, 3, 16, 16)
    pruner = tnvp.Pruner(model, example_inputs=x, window=window, criterion="obs", compensation="none", ignore=["9"])
    watch(pruner, x)
    whole, locations = pruner._recorder.covariance("9")
    report = pruner.prune(sparsity=0.5)
    kept = report.cuts["9", "in"][::locations] // locations
    assert torch.equal(pruner._recorder.covariance("9")[0], whole[kept][:, kept])
    watch(pruner, x)  # and it goes on
    assert pruner._recorder.covariance("9")[0].shape == (len(kept), len(kept))


def test_since_prune_forgets_covariances_at_an_event():
    model = mlp()
    pruner = tnvp.Pruner(model, example_inputs=X, window="since_prune", criterion="obs", compensation="none")
    watch(pruner, X)
    pruner.prune(sparsity=0.5)
    with pytest.raises(PruningError, match=r"0 samples of the covariance at '2'.*record"):
        pruner._recorder.covariance("2")
    watch(pruner, batch(1))
    expected = torch.cov(model[:2](batch(1)).detach().double().T)
    torch.testing.assert_close(pruner._recorder.covariance("2")[0], expected, rtol=1e-5, atol=1e-6)


def test_a_covariance_is_kept_only_where_asked_for():
    recorder = recorder_of(mlp(), kinds=("activation",))
    run(recorder, X)
    assert not recorder._covariances
    recorder = recorder_of(mlp(), kinds=("covariance",))
    with recorder.record(covariance=False):
        recorder.model(X)
    assert not recorder._covariances and recorder.batches == 1


# ==== Windows ====


def test_an_unknown_window_is_named():
    with pytest.raises(PruningError, match=r"window 'epoch'.*cumulative.*since_prune.*ema"):
        recorder_of(mlp(), window="epoch")


def activations(model: nn.Module, *batches: torch.Tensor) -> torch.Tensor:
    return torch.cat([model[:2](x).detach() for x in batches]).double()


def test_trace_rows_hold_each_window_alone_and_scores_look_at_all_of_them():
    model = mlp()
    recorder = recorder_of(model, kinds=("activation",))
    run(recorder, batch(1), batch(2))
    recorder.close_window(step=20)
    run(recorder, batch(3) * 3)
    recorder.close_window(step=30)
    assert [(row.step, row.group, row.count) for row in recorder.trace] == [
        (20, "0", 12), (20, "2", 12), (30, "0", 6), (30, "2", 6),
    ]  # fmt: skip
    for row, batches in ((recorder.trace[0], (batch(1), batch(2))), (recorder.trace[2], (batch(3) * 3,))):
        expected = activations(model, *batches)
        assert row.neuron.tolist() == list(range(11))
        torch.testing.assert_close(row.mean, expected.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(row.variance, expected.var(0), rtol=1e-5, atol=1e-6)
    everything = activations(model, batch(1), batch(2), batch(3) * 3)
    torch.testing.assert_close(recorder.moments(("2", "in")).variance, everything.var(0), rtol=1e-5, atol=1e-6)


def test_a_window_with_nothing_in_it_adds_no_row():
    recorder = recorder_of(mlp())
    recorder.close_window(1)
    run(recorder, X[:1])
    recorder.close_window(2)
    assert recorder.trace == [], "one sample has no variance: the window stays open"
    run(recorder, X[1:])
    recorder.close_window(3)
    assert [row.count for row in recorder.trace] == [6, 6]


def pruner_of(window: str = "cumulative", criterion: str = "variance") -> tnvp.Pruner:
    model = mlp()
    return tnvp.Pruner(model, example_inputs=X, window=window, criterion=criterion)


def watch(pruner: tnvp.Pruner, *batches: torch.Tensor) -> None:
    with pruner.record(), torch.no_grad():
        for x in batches:
            pruner.model(x)


@pytest.mark.parametrize("closed", [False, True])
def test_windows_after_an_event(closed):
    """cumulative goes on with the survivors' past, since_prune starts anew."""
    for window in ("cumulative", "since_prune"):
        torch.manual_seed(0)
        pruner = pruner_of(window)
        watch(pruner, batch(1))
        if closed:
            pruner.close_window()
        past = activations(pruner.model, batch(1))
        kept = pruner.prune(sparsity=0.5).groups[0].kept
        watch(pruner, batch(2), batch(3))
        recent = activations(pruner.model, batch(2), batch(3))
        seen = torch.cat([past[:, kept], recent]) if window == "cumulative" else recent
        scores = pruner.prune(sparsity=0.5).groups[0].scores
        torch.testing.assert_close(scores.double(), seen.var(0), rtol=1e-5, atol=1e-6)


def test_ema_weighs_recent_batches_more_and_closing_a_window_does_not_touch_it():
    pruners = [pruner_of("ema") for _ in range(2)]
    pruners[1].model.load_state_dict(pruners[0].model.state_dict())
    found = []
    for pruner, close in zip(pruners, (False, True), strict=True):
        for i in range(3):
            watch(pruner, batch(i) * (i + 1))
            if close:
                pruner.close_window()
        found.append(pruner.prune(sparsity=0.0).groups[0].scores)
    assert torch.equal(*found)
    plain = activations(pruners[0].model, *(batch(i) * (i + 1) for i in range(3))).var(0)
    assert not torch.allclose(found[0], plain, rtol=1e-3)


# ==== Neurons keep their names ====


@pytest.mark.parametrize("window", ["cumulative", "since_prune", "ema"])
def test_neurons_keep_the_id_they_were_born_with_over_several_events(window):
    pruner = pruner_of(window)
    layers = {"0": pruner.model[0], "2": pruner.model[2]}
    for layer in layers.values():
        layer.weight.detach().add_(100.0 * torch.arange(len(layer.weight))[:, None])
    born = {name: number_plates(layer) for name, layer in layers.items()}
    gone: dict[str, set[int]] = {"0": set(), "2": set()}
    for sparsity in (0.2, 0.4, 0.4, 0.7):
        watch(pruner, batch(1), batch(2))
        pruner.close_window()
        report = pruner.prune(sparsity=sparsity)
        for group in report.groups:
            alive = number_plates(layers[group.name])
            assert group.kept_ids == alive
            assert not set(group.removed_ids) & (gone[group.name] | set(alive))
            gone[group.name] |= set(group.removed_ids)
            assert sorted(gone[group.name] | set(alive)) == born[group.name]
    watch(pruner, batch(3))
    pruner.close_window()
    assert {row.group: row.neuron.tolist() for row in pruner.trace} == {g.name: g.kept_ids for g in report.groups}
    assert [len(row.neuron) for row in pruner.trace[:2]] == [11, 9], "rows from before an event stay as they were"


def number_plates(layer: nn.Linear) -> list[int]:
    """Each row's number, which the test wrote into its weights and which stays whatever columns go."""
    return [round(float(row.mean()) / 100) for row in layer.weight.detach()]


def test_an_event_inside_a_record_block_goes_on_recording_and_watches_no_pass_of_its_own():
    model = mlp()
    pruner = tnvp.Pruner(model, example_inputs=X)
    with pruner.record(), torch.no_grad():
        for i in range(4):
            model(batch(i))
            if i == 1:
                pruner.prune(sparsity=0.5, calibration=[batch(9)])
    pruner.close_window()
    assert {row.count for row in pruner.trace} == {24}
    assert {len(row.neuron) for row in pruner.trace} == {5, 4}
    assert hooks(model) == 0


# ==== A recorder of everything serves each ====


@pytest.mark.parametrize("window", recorders.WINDOWS)
@pytest.mark.parametrize("kinds", [("activation",), ("preactivation", "activation"), ("nonzero",), ("taylor",)])
def test_what_a_wide_recorder_saw_is_what_any_other_would_have_seen(kinds, window):
    def train(recorder: Recorder, seeds: range) -> None:
        with recorder.record(covariance=False):
            for i in seeds:
                recorder.model(batch(i)).square().sum().backward()
                if i % 3 == 2:
                    recorder.close_window(i)

    torch.manual_seed(0)
    model = mlp()
    groups = tnvp.explain(model, X)
    narrow, wide = Recorder(model, groups, kinds, window), Recorder(model, groups, ("activation",), wide=True)
    train(narrow, range(7))
    train(wide, range(7))
    stored = io.BytesIO()
    torch.save(wide.state(), stored)
    stored.seek(0)
    restored = Recorder(model, groups, kinds, window)
    restored.restore(torch.load(stored, weights_only=True))
    for recorder in (narrow, restored):
        train(recorder, range(7, 12))
    assert restored._current.keys() == narrow._current.keys()
    for layer, side, quantity in narrow._current:
        expected, found = (r.moments((layer, side), quantity) for r in (narrow, restored))
        assert found.count == expected.count > 0
        assert torch.equal(found.mean, expected.mean) and torch.equal(found.variance, expected.variance)
    assert len(restored.trace) == len(narrow.trace) > 0
    for expected, found in zip(narrow.trace, restored.trace, strict=True):
        assert expected[:2] == found[:2] and torch.equal(expected.variance, found.variance)


def test_a_state_that_lacks_what_is_watched_is_refused():
    narrow, other = recorder_of(mlp(), kinds=("activation",)), recorder_of(mlp(), kinds=("taylor",))
    with pytest.raises(PruningError, match="lacks"):
        other.restore(narrow.state())
