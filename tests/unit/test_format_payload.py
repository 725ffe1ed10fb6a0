from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from dcpstore.format import dtypes
from dcpstore.format.payload import as_bytes, copy_box_in, copy_bytes_out

NAMES = [n for n, row in dtypes.DTYPES.items() if row.is_plain and hasattr(torch, n)]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    top = 2 if dtype == torch.bool else 251
    count = math.prod(shape) * dtype.itemsize
    return (torch.arange(count) % top).to(torch.uint8).view(dtype).reshape(shape)


def payload(tensor: torch.Tensor) -> bytes:
    """The oracle: torch's own contiguous copy."""
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return whole.view(-1).view(torch.uint8).numpy().tobytes()


def unaligned(num_bytes: int, shift: int) -> torch.Tensor:
    return torch.zeros(num_bytes + shift, dtype=torch.uint8)[shift:]


def sources() -> dict[str, torch.Tensor]:
    base = torch.arange(120, dtype=torch.float32).reshape(4, 5, 6)
    lazy = torch.complex(base, -base)
    return {
        "contiguous": base,
        "scalar": torch.tensor(3.5),
        "empty": base[:, 2:2],
        "transposed": base.transpose(0, 2),
        "view of a larger storage": base[1:3, 2:4, 1:5],
        "stepped": base[::2, :, ::3],
        "expanded": base[:, :1, :].expand(4, 9, 6),
        "expanded scalar": torch.tensor(2.0).expand(3, 4),
        "conj": lazy.conj(),
        "conj transposed": lazy.conj().transpose(0, 1),
        "neg": lazy.conj().imag,
        "neg view": lazy.conj().imag[1:, :, 2:],
        "conj scalar": torch.tensor(1 + 2j).conj(),
        "requires grad": base.clone().requires_grad_(),
        "channels last": torch.arange(120.0)
        .reshape(1, 4, 5, 6)
        .contiguous(memory_format=torch.channels_last),
        "bool stepped": (torch.arange(30) % 3 == 0)[::2],
    }


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", list(sources()))
def test_any_run_of_elements_is_copied_out(kind: str, shift: int) -> None:
    source = sources()[kind]
    data = payload(source)
    item = source.element_size()
    marks = sorted({0, 1, 2, 5, 6, 7, 29, 30, 31, source.numel() - 1, source.numel()})
    marks = [m * item for m in marks if 0 <= m <= source.numel()]
    for start in marks:
        for end in (m for m in marks if m >= start):
            out = unaligned(end - start, shift)
            copy_bytes_out(source, start, end, out)
            assert out.numpy().tobytes() == data[start:end]


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_copied_out_and_in(name: str) -> None:
    dtype = dtypes.dtype_from_name(name)
    source = filled(dtype, (3, 4, 5))
    for view in (source, source.transpose(0, 2), source[:, 1:3, ::2]):
        for shift in (0, 1):
            out = unaligned(view.numel() * dtype.itemsize, shift)
            copy_bytes_out(view, 0, len(out), out)
            assert out.numpy().tobytes() == payload(view)
    box = source[1:, 1:3, 2:4]
    for shift in (0, 1):
        data = memoryview(bytes(shift) + payload(source))[shift:]
        for target in (torch.zeros_like(box), filled(dtype, (2, 2, 2)).transpose(0, 2)):
            copy_box_in(data, 0, dtype, source.stride(), (1, 1, 2), (2, 2, 2), target)
            assert payload(target) == payload(box)


@pytest.mark.parametrize(
    ("start", "end", "num_out"),
    [(-4, 4, 8), (0, 44, 44), (2, 6, 4), (0, 6, 6), (8, 4, 0), (0, 8, 4)],
)
def test_a_run_that_does_not_fit_is_refused(start: int, end: int, num_out: int) -> None:
    out = torch.zeros(num_out, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"whole elements|out must be"):
        copy_bytes_out(torch.arange(10.0), start, end, out)


def test_the_place_to_copy_to_must_be_flat_bytes() -> None:
    for out in (torch.zeros(4), torch.zeros(16, dtype=torch.uint8)[::4]):
        with pytest.raises(ValueError, match="out must be"):
            copy_bytes_out(torch.zeros(1), 0, 4, out)


def test_a_read_only_buffer_raises_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for buffer in (bytes(range(16)), memoryview(bytes(range(16))), np.frombuffer(bytes(16))):
            target = torch.empty(16, dtype=torch.uint8)
            copy_box_in(buffer, 0, torch.uint8, (1,), (0,), (16,), target)
            assert target.numpy().tobytes() == bytes(buffer)


@pytest.mark.parametrize("shift", [0, 3])
def test_a_box_is_cast_to_the_dtype_of_the_target(shift: int) -> None:
    chunk = torch.arange(600 * 1000, dtype=torch.float32).reshape(600, 1000)
    data = memoryview(bytes(shift) + payload(chunk))[shift:]
    target = torch.zeros(1000, 600, dtype=torch.float64).t()
    copy_box_in(data, 0, torch.float32, (1000, 1), (0, 0), (600, 1000), target)
    assert torch.equal(target, chunk.double())


def test_a_lazy_target_takes_the_values() -> None:
    chunk = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1)
    for shift in (0, 1):
        data = memoryview(bytes(shift) + payload(chunk))[shift:]
        target = torch.zeros(6, dtype=torch.complex64).conj()
        copy_box_in(data, 0, torch.complex64, (1,), (0,), (6,), target)
        assert torch.equal(target, chunk)


def test_part_of_a_payload_fills_the_boxes_that_lie_in_it() -> None:
    chunk = torch.arange(60, dtype=torch.int64).reshape(6, 10)
    data = payload(chunk)[2 * 80 : 5 * 80]
    target = torch.zeros(3, 4, dtype=torch.int64)
    copy_box_in(data, 160, torch.int64, (10, 1), (2, 5), (3, 4), target)
    assert torch.equal(target, chunk[2:5, 5:9])
    for offsets in ((1, 5), (3, 5)):
        with pytest.raises(ValueError, match="the box needs payload bytes"):
            copy_box_in(data, 160, torch.int64, (10, 1), offsets, (3, 4), target)


def test_scalars_and_empty_boxes_are_copied_in() -> None:
    target = torch.tensor(0.0)
    copy_box_in(payload(torch.tensor(2.5)), 0, torch.float32, (), (), (), target)
    assert target.item() == 2.5
    copy_box_in(b"", 0, torch.float32, (1, 1), (0, 0), (0, 4), torch.zeros(0, 4))


def test_a_target_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="the target has shape"):
        copy_box_in(bytes(16), 0, torch.float32, (1,), (0,), (4,), torch.zeros(2, 2))


def test_a_parameter_is_filled_in_place() -> None:
    target = torch.nn.Parameter(torch.zeros(4))
    copy_box_in(payload(torch.arange(4.0)), 0, torch.float32, (1,), (0,), (4,), target)
    assert target.tolist() == [0, 1, 2, 3]
    assert target.grad_fn is None


def test_tensors_of_inference_mode_are_written_from_any_thread() -> None:
    with torch.inference_mode():
        target, out = torch.zeros(2, 2), torch.zeros(16, dtype=torch.uint8)
    copy_box_in(payload(torch.ones(4)), 0, torch.float32, (2, 1), (0, 0), (2, 2), target.t())
    copy_bytes_out(target, 0, 16, out)
    copy_bytes_out(target.t(), 0, 16, out)
    assert out.numpy().tobytes() == payload(torch.ones(4))


def test_a_default_device_does_not_matter() -> None:
    chunk = torch.arange(6.0).reshape(2, 3)
    for shift in (0, 1):
        data = memoryview(bytes(shift) + payload(chunk))[shift:]
        target = torch.zeros(3, 2, dtype=torch.float64).t()
        with torch.device("meta"):
            copy_box_in(data, 0, torch.float32, (3, 1), (0, 0), (2, 3), target)
        assert torch.equal(target, chunk.double())


def test_a_scratch_of_bounded_size_serves_boxes_of_any_shape() -> None:
    # Unaligned and cast: rows longer than the scratch, and many short rows.
    for shape in ((3, 400_000), (400_000, 3), (2, 1, 300_001)):
        chunk = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
        data = memoryview(bytes(1) + payload(chunk))[1:]
        target = torch.zeros(shape, dtype=torch.int64)
        offsets = [0] * len(shape)
        copy_box_in(data, 0, torch.int32, chunk.stride(), offsets, shape, target)
        assert torch.equal(target, chunk.long())
    lazy = torch.complex(torch.arange(300_000.0), torch.ones(300_000)).reshape(3, -1).conj()
    out = unaligned(lazy.numel() * 8, 1)
    copy_bytes_out(lazy, 0, len(out), out)
    assert out.numpy().tobytes() == payload(lazy)


def test_as_bytes_shares_the_memory_of_a_contiguous_tensor() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    as_bytes(tensor).fill_(0xFF)
    assert tensor.isnan().all()
    assert as_bytes(torch.tensor(True)).tolist() == [1]
    assert as_bytes(torch.zeros(0, 3)).shape == (0,)
    assert as_bytes(torch.zeros(1).expand(4)[:0]).shape == (0,)
    assert as_bytes(torch.zeros(1).as_strided((1,), (0,))).shape == (4,)
    for other in (torch.zeros(3, 4).t(), torch.zeros(2, dtype=torch.complex64).conj()):
        with pytest.raises(ValueError, match="its own payload"):
            as_bytes(other)
