"""What a file is that is no ``torch.save`` file, so that messages can name it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["describe_archive", "describe_start"]

# torch.save's own format before 1.6: a pickle of this number comes first.
_LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_STARTS = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip file; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file; unpack it first"),
    (b"BZh", "a bzip2 file; unpack it first"),
    (b"\xfd7zXZ\x00", "an xz file; unpack it first"),
    (b"\x93NUMPY", "a NumPy array file"),
    (b"GGUF", "a GGUF file"),
    (b"DCPSTORE", "the manifest of a DCP checkpoint; give the URL of its folder"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file; run 'git lfs pull'"),
    (b"<", "text, such as an error page of a web server"),
)
_TAR_AT = 257


def describe_start(head: bytes, size_bytes: int) -> str:
    """Say what a file is, from its first bytes.

    Args:
        head: Up to 512 bytes.
        size_bytes: Length of the file.
    """
    if not size_bytes:
        return "it is empty"
    for start, meaning in _STARTS:
        if head.startswith(start):
            return f"it is {meaning}"
    if head[:2] == b"\x80\x02" and head[2:].startswith(_LEGACY_MAGIC):
        return (
            "it has the format of torch before 1.6 (a run of pickles, not a zip file), of which no"
            " part can be read alone; load it with torch.load and save it again with torch.save"
        )
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar":
        return "it is a tar file, perhaps of torch before 0.1.10"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "it is a plain pickle"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size_bytes:
        return "it is a safetensors file"
    return f"it starts with {head[:8]!r}"


def describe_archive(names: Sequence[str]) -> str | None:
    """Say what a zip file is, from its members' names; None if it may be of ``torch.save``."""
    inner = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        return (
            "it is a TorchScript archive, which holds a program; load it with torch.jit.load and"
            " save its state_dict() with torch.save"
        )
    if "archive_format" in inner or any(name.startswith("models/") for name in inner):
        return "it is an archive of torch.export (.pt2)"
    if "data.pkl" in inner:
        return None
    if any(name.startswith(".data/") for name in inner):
        return "it is an archive of torch.package"
    if any(name.endswith(".npy") for name in names):
        return "it is an archive of NumPy arrays (.npz)"
    shown = ", ".join(map(repr, names[:4])) or "nothing"
    return f"it is a zip file that holds {shown} and no data.pkl"
