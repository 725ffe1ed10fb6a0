from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from dcpstore.errors import IncompatibleError
from dcpstore.format.payload import is_plain, to_plain
from dcpstore.format.tensors import decode_opaque, encode_opaque

# Torch's own loader of quantized tensors touches its deprecated storages.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


class Marked(torch.Tensor):
    pass


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.arange(8.0), 0.5, 3, torch.qint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def test_strided_tensors_with_data_are_plain() -> None:
    base = torch.zeros(4, 6)
    for tensor in (
        base,
        base.t(),
        base[::2],
        torch.nn.Parameter(base),
        torch.nn.Buffer(base),
        torch.tensor(1.0),
        torch.zeros(0, 3),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, dtype=torch.uint16),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
    ):
        assert is_plain(tensor)


def test_whatever_bytes_alone_do_not_say_is_not_plain() -> None:
    with FakeTensorMode():
        fake = torch.zeros(3)
    for tensor in (
        quantized(),
        nested(),
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.zeros(3).as_subclass(Marked),
        torch.zeros(3, dtype=torch.uint8).view(torch.uint4),
        fake,
        AsyncCollectiveTensor(torch.zeros(3)),
    ):
        assert not is_plain(tensor)


def test_to_plain_waits_detaches_and_unwraps() -> None:
    data = torch.arange(3.0)
    for tensor in (data, torch.nn.Parameter(data), AsyncCollectiveTensor(data)):
        plain = to_plain(tensor)
        assert is_plain(plain)
        assert type(plain) is torch.Tensor
        assert not plain.requires_grad
        assert plain.data_ptr() == data.data_ptr()


def test_opaque_tensors_come_back_whole() -> None:
    sparse = decode_opaque(encode_opaque(torch.eye(3).to_sparse()))
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    original = quantized()
    loaded = decode_opaque(memoryview(encode_opaque(original)))
    assert loaded.q_scale() == 0.5
    assert torch.equal(loaded.int_repr(), original.int_repr())
    assert torch.equal(
        torch.load(io.BytesIO(encode_opaque(original)), weights_only=True).int_repr(),
        original.int_repr(),
    )


def test_an_opaque_view_does_not_carry_its_whole_storage() -> None:
    large = torch.zeros(100_000, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = torch.quantize_per_tensor(large, 0.5, 3, torch.qint8)[:8]
    assert len(encode_opaque(part)) < 4000


def test_a_meta_tensor_cannot_be_saved() -> None:
    with pytest.raises(IncompatibleError, match="no data to save"):
        encode_opaque(torch.zeros(3, device="meta"))


def test_an_opaque_record_must_hold_a_tensor() -> None:
    stream = io.BytesIO()
    torch.save([1], stream)
    with pytest.raises(IncompatibleError, match="a list"):
        decode_opaque(stream.getvalue())
