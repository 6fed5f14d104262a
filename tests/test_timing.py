"""`loader.time`: what it returns, what it refuses, and that it times the device."""

import pickle
import time

import pytest
import torch

import loader


def test_a_call_on_the_cpu_is_timed_in_milliseconds():
    """A sleep takes what it says, and more on a busy machine."""
    taken = loader.time(lambda: time.sleep(0.004), device="cpu", repeats=5)
    assert isinstance(taken, float) and 4 <= taken < 400
    assert len(taken.samples) == 5 and min(taken.samples) <= taken <= max(taken.samples)
    assert taken.device == torch.device("cpu")
    assert "ms (" in repr(taken) and "5 calls, cpu)" in f"{taken!s}"
    assert f"{taken:.1f}" == f"{float(taken):.1f}" and "<table>" in taken._repr_html_()
    assert pickle.loads(pickle.dumps(taken)).samples == taken.samples


def test_calls_are_counted():
    calls = []
    loader.time(lambda: calls.append(1), device="cpu", repeats=7, warmup=2, flush=False)
    assert len(calls) == 9
    calls.clear()
    loader.time(lambda: calls.append(1), device="cpu", flush=False)
    assert 5 + 3 < len(calls) <= 100 + 4


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ((3,), TypeError, "fn must be a function without arguments, got int; wrap the call"),
        ((print, 3), TypeError, "positional"),
        ((print,), ValueError, "repeats must be 1 or more, got 0"),
    ],
)
def test_what_cannot_be_timed(arguments, kind, message):
    with pytest.raises(kind, match=message):
        loader.time(*arguments, repeats=0)


def test_devices_that_are_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loader.time(lambda: None, repeats=1, flush=False).device.type == "cpu"
    with pytest.raises(RuntimeError, match="cuda:0 is not there: torch sees no GPU"):
        loader.time(lambda: None, device="cuda:0")
    with pytest.raises(ValueError, match="CUDA device or the CPU, got meta"):
        loader.time(lambda: None, device="meta")


@pytest.mark.cuda
def test_a_copy_takes_what_its_bytes_take():
    x = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    small = loader.time(lambda: y[: 1 << 20].copy_(x[: 1 << 20]), repeats=20)
    large = loader.time(lambda: y.copy_(x))
    assert large.device == torch.device("cuda", torch.cuda.current_device())
    assert 50 < 2 * (1 << 28) / large / 1e6 < 20_000  # GB/s: what GPUs of today can do
    assert small < large and 5 <= len(large.samples) <= 100


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_is_timed_on_its_own_stream():
    x = torch.ones(1 << 26, device="cuda:1")
    assert loader.time(lambda: x.add_(1), device="cuda:1", repeats=5).device.index == 1
    assert torch.cuda.current_device() == 0
