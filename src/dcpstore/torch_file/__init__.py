"""``torch.save`` files in any object store, read by ranges.

```python
with open_torch_file("s3://bucket/model.pt") as file:
    weight = file.value["model"]["weight"]  # a stand-in on the meta device
    rows = file.read_box(weight, offsets=(0, 0), sizes=(8, weight.shape[1]))
```
"""

from __future__ import annotations

from dcpstore.torch_file.file import StoredStorage, TensorPlace, TorchFile, open_torch_file

__all__ = ["StoredStorage", "TensorPlace", "TorchFile", "open_torch_file"]
