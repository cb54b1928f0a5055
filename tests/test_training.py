"""The loop, its schedules and callbacks."""

import copy
import io

import pytest
import torch
from torch import nn

from tnvp.training import (
    OPTIMIZERS,
    SCHEDULES,
    Callback,
    TrainingError,
    Validation,
    device_of,
    evaluate,
    make_schedule,
    memory_told,
    train,
)


def batches(n=6, size=8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, size, 5, generator=generator)
    return [(batch, (batch.sum(1) > 0).long()) for batch in x]


def fitted(model, epochs=3, schedule="constant", callbacks=(), lr=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    steps = make_schedule(schedule, optimizer, lr, epochs * 6)
    reached = train(model, optimizer, steps, batches, epochs=epochs, steps_per_epoch=6, callbacks=callbacks, **options)
    return optimizer, reached


def test_training_learns_and_counts_its_steps():
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    before = evaluate(model, batches())
    _, reached = fitted(model, epochs=10, first_step=100)
    after = evaluate(model, batches())
    assert reached == 160
    assert after["loss"] < before["loss"] and after["accuracy"] > 90


def test_evaluate_equals_a_direct_computation_and_restores_the_mode():
    model = nn.Sequential(nn.Linear(5, 2), nn.Dropout(0.9)).train()
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    model.eval()
    scores = model(x)
    model.train()
    found = evaluate(model, batches())
    assert model.training and model[1].training
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, y).detach()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * float((scores.argmax(1) == y).float().mean()))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_schedule_peaks_at_the_rate_asked_for_and_leaves_momentum_alone(name, optimizer):
    made = OPTIMIZERS[optimizer](nn.Linear(2, 2).parameters(), lr=5.0)
    options = {key: made.param_groups[0][key] for key in ("momentum", "betas") if key in made.param_groups[0]}
    for peak in (0.1, 0.03):  # a second phase starts anew, whatever the first left behind
        schedule = make_schedule(name, made, peak, 50)
        rates = []
        for _ in range(50):
            rates.append(made.param_groups[0]["lr"])
            made.step()
            schedule.step()
        assert max(rates) == pytest.approx(peak, rel=0.01)
        assert {key: made.param_groups[0][key] for key in options} == options


class Spy(Callback):
    def __init__(self):
        self.calls = []

    def on_start(self, fit):
        self.calls.append("start")

    def on_step(self, fit):
        self.calls.append(("step", fit.step, round(fit.epoch, 3)))

    def on_epoch(self, fit):
        self.calls.append("epoch")

    def on_end(self, fit):
        self.calls.append("end")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_scales_the_first_steps_of_any_schedule_and_then_leaves_it_alone(name):
    plain, warm = (
        rates(make_schedule(name, made, 0.2, 30, warmup), made)
        for made, warmup in ((sgd(nn.Linear(2, 2)), 0), (sgd(nn.Linear(2, 2)), 10))
    )
    assert warm[:10] == pytest.approx([lr * (k + 1) / 10 for k, lr in enumerate(plain[:10])])
    assert warm[10:] == pytest.approx(plain[10:])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


def rates(schedule, optimizer) -> list[float]:
    """The learning rate of each of 30 steps."""
    found = []
    for _ in range(30):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_callbacks_are_called_in_order():
    spy = Spy()
    fitted(nn.Linear(5, 2), epochs=1, callbacks=[spy])
    assert spy.calls == ["start", *(("step", i, round(i / 6, 3)) for i in range(1, 7)), "epoch", "end"]


def test_on_end_comes_also_after_an_error():
    class Fails(Callback):
        def on_step(self, fit):
            raise RuntimeError("stop")

    spy = Spy()
    with pytest.raises(RuntimeError, match="stop"):
        fitted(nn.Linear(5, 2), callbacks=[spy, Fails()])
    assert spy.calls[-1] == "end"


def test_a_loss_that_is_no_number_names_step_and_way_out():
    class Look(Callback):
        def on_step(self, fit):
            fit.totals()

    model = nn.Linear(5, 2)
    nn.init.constant_(model.weight, float("nan"))
    with pytest.raises(TrainingError, match=r"nan before step 1 .*optimizer\.lr"):
        fitted(model, callbacks=[Look()])


def test_validation_restores_the_best_epoch_with_its_optimizer_state():
    accuracies = iter([50.0, 90.0, 70.0])
    seen = []

    def judge():
        seen.append([p.detach().clone() for p in model.parameters()])
        return {"accuracy": next(accuracies)}

    model = nn.Linear(5, 2)
    validation = Validation(judge)
    optimizer, _ = fitted(model, callbacks=[validation])
    validation.restore(model, optimizer)
    assert all(torch.equal(p, best) for p, best in zip(model.parameters(), seen[1], strict=True))


def test_after_forget_only_later_epochs_count():
    class ForgetAtStep8(Callback):
        def on_step(self, fit):
            if fit.step == 8:
                validation.forget()

    accuracies = iter([99.0, 60.0, 50.0])
    seen = []

    def judge():
        seen.append(model.weight.detach().clone())
        return {"accuracy": next(accuracies)}

    model = nn.Linear(5, 2)
    validation = Validation(judge)
    optimizer, _ = fitted(model, callbacks=[ForgetAtStep8(), validation])
    validation.restore(model, optimizer)
    assert torch.equal(model.weight, seen[1])


def test_out_of_memory_names_the_batch_size():
    class Full(nn.Linear):
        def forward(self, x):
            raise torch.OutOfMemoryError("tried to allocate")

    with pytest.raises(TrainingError, match="batch_size=8"), memory_told(8):
        fitted(Full(5, 2))


def test_device_of():
    assert device_of("cpu") == torch.device("cpu")
    assert device_of("auto").type == ("cpu" if not torch.accelerator.is_available() else device_of("auto").type)
    if not torch.cuda.is_available():
        with pytest.raises(TrainingError, match="device=auto"):
            device_of("cuda")


class Snapshots(Callback):
    """After each step and epoch, what it takes to go on from there, as it comes back from a file."""

    def __init__(self, validation):
        self.validation, self.taken = validation, []

    def on_step(self, fit):
        file = io.BytesIO()
        torch.save((fit.state(), self.validation.state(), tuple(fit.totals())), file)
        file.seek(0)
        self.taken.append(torch.load(file, weights_only=True))

    on_epoch = on_step


@pytest.mark.parametrize(("optimizer", "schedule"), list(zip(OPTIMIZERS, SCHEDULES, strict=True)))
def test_training_goes_on_bit_for_bit_from_any_step(optimizer, schedule, monkeypatch):
    """With a loss scale that grows, a warm-up longer than an epoch, and an early epoch that was the best."""
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: real(*a, **k, init_scale=8.0, growth_interval=4))
    accuracies = {6: 2, 12: 3, 18: 1}  # by step

    def run(resumed=None, held=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
        made = OPTIMIZERS[optimizer](model.parameters(), lr=0.05)
        validation = Validation(lambda: {"accuracy": accuracies[snapshots.fit.step], "loss": 0.0})
        snapshots = Snapshots(validation)
        snapshots.on_start = lambda fit: setattr(snapshots, "fit", fit)
        if held is not None:
            validation.go_on_from(held)
        steps = make_schedule(schedule, made, 0.05, 18, warmup_steps=9)
        options = dict(epochs=3, steps_per_epoch=6, precision="float16", resumed=resumed)
        train(model, made, steps, batches, callbacks=[validation, snapshots], **options)
        last = copy.deepcopy((model.state_dict(), snapshots.fit.scaler.state_dict()))
        validation.restore(model, made)
        return snapshots.taken, [last, model.state_dict(), made.state_dict(), validation.latest]

    taken, whole = run()
    assert taken[-1][0]["scaler"]["scale"] > 8 and not equal(whole[0][0], whole[1])
    for number, (state, held, _) in list(enumerate(taken))[::2]:
        rest, end = run(state, held)
        assert equal(rest, taken[number + 1 :]) and equal(end, whole)


def equal(one, other) -> bool:
    """Whether two nests of plain data and tensors agree, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other
