"""Object stores as verbs: the protocol, its engines and its wrappers.

```python
store = open_store("s3://bucket/run", storage_options={"endpoint_url": "http://localhost:9000"})
store.put("a/b", b"bytes", mode="create")
store.get_range("a/b", 1, 3)
```
"""

from __future__ import annotations

from dcpstore.store.base import Capabilities, Fetched, IfMatch, ObjectInfo, PutMode, Store
from dcpstore.store.folder import open_store
from dcpstore.store.retry import AdaptiveLimiter, RetryingStore, RetryPolicy

__all__ = [
    "AdaptiveLimiter",
    "Capabilities",
    "Fetched",
    "IfMatch",
    "ObjectInfo",
    "PutMode",
    "RetryPolicy",
    "RetryingStore",
    "Store",
    "open_store",
]
