"""What to grant for each verb, in the words of each provider."""

from __future__ import annotations

from dcpstore.errors import CheckpointError, ConfigError, NotFoundError, StoreError

__all__ = ["Verb", "advice_on", "is_missing_bucket"]

Verb = str

_GRANTS: dict[str, dict[Verb, str]] = {
    "s3": {
        "get": "s3:GetObject",
        "put": "s3:PutObject",
        "list": "s3:ListBucket",
        "delete": "s3:DeleteObject",
        "uploads": "s3:ListBucketMultipartUploads and s3:AbortMultipartUpload",
    },
    "gs": {
        "get": "storage.objects.get",
        "put": "storage.objects.create",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
    "az": {
        "get": "the role Storage Blob Data Reader (or r in the SAS token)",
        "put": "the role Storage Blob Data Contributor (or c and w in the SAS token)",
        "list": "the role Storage Blob Data Reader (or l in the SAS token)",
        "delete": "the role Storage Blob Data Contributor (or d in the SAS token)",
    },
    "file": {
        "get": "read permission on the folder and its files",
        "put": "write permission on the folder",
        "list": "read permission on the folder",
        "delete": "write permission on the folder",
    },
}
_SKEWED = ("RequestTimeTooSkewed", "AccessDenied: Request has expired")
_EXPIRED = ("ExpiredToken", "have expired")
_UNKNOWN_KEY = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthFailure", "InvalidToken")


def is_missing_bucket(error: CheckpointError) -> bool:
    """Tell a bucket that is not there from an object that is not."""
    return isinstance(error, NotFoundError) and "no such bucket" in error.message


def advice_on(error: CheckpointError, scheme: str, verb: Verb) -> str:
    """Say what to do about an error that a verb met."""
    if is_missing_bucket(error):
        return "create the bucket, or check its name; dcpstore never creates one"
    if isinstance(error, NotFoundError):
        return "give the URL of a checkpoint: there is none here"
    if isinstance(error, ConfigError):
        return "correct the URL or the storage options"
    if any(word in error.message for word in _SKEWED):
        return "set this machine's clock (NTP): the store refuses requests of another time"
    if any(word in error.message for word in _EXPIRED):
        return "renew the credentials"
    if any(word in error.message for word in _UNKNOWN_KEY):
        return "the store does not know this key: check key, secret, profile and endpoint"
    if isinstance(error, StoreError) and error.denied:
        grant = _GRANTS.get(scheme, {}).get(verb)
        return f"grant {grant}, or check the credentials" if grant else "check the credentials"
    if isinstance(error, StoreError) and error.throttled:
        return "the store asks for fewer requests: try again later, or with fewer ranks"
    if isinstance(error, StoreError) and error.retryable:
        return "check the endpoint, the network, proxies and TLS"
    return "see the store's answer"
