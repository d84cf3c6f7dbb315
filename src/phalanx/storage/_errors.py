"""Says in plain words why a bucket did not do what was asked: the URL, what was tried, what to do.

Owns the errors of this package and the translation of those of the client library. Each is an ``OSError`` too, since
whoever writes a save treats a bucket as it treats a disk: what it does not take now is tried again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.errors import PhalanxError

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), AWS_REGION, or the machine's role",
    "gs": "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS (a key file), or the machine's account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or its identity",
}
ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}
_LONGEST = 400


class StorageError(PhalanxError, OSError):
    """A bucket cannot be read or written; the message names the URL, what was tried, and a remedy."""


class NotStored(StorageError, FileNotFoundError):
    """There is no object of this name."""


@contextmanager
def told(url: str, scheme: str, what: str) -> Iterator[None]:
    """Make a ``StorageError`` of whatever the client library raises while ``what`` is done at ``url``."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # the library's errors have no base in common that is ours to name without importing it
        if not _is_the_librarys(error):
            raise
        text = _shortened(str(error))
        if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in text and "ContainerNotFound" not in text:
            raise NotStored(f"{url}: there is no such object ({what})") from error
        raise StorageError(f"{url}: {what} failed: {text}. {remedy(scheme, type(error).__name__, text)}") from error


def _is_the_librarys(error: Exception) -> bool:
    return type(error).__module__.startswith("obstore") or isinstance(error, FileNotFoundError)


def _shortened(text: str) -> str:
    """Return the sentence of an error, without the library's own innards.

    >>> _shortened("Generic S3 error: <Error><Code>NoSuchBucket</Code></Error>\\n\\nDebug source:\\nGeneric {")
    'Generic S3 error: NoSuchBucket'
    """
    text = text.partition("\n\nDebug source")[0].strip()
    text = re.sub(r"<\?xml.*?\?>\s*", "", text)
    text = re.sub(
        r"<Error>.*?<Code>(.*?)</Code>(?:\s*<Message>(.*?)</Message>)?.*", _code_and_message, text, flags=re.S
    )
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def _code_and_message(found: re.Match[str]) -> str:
    return found[1] if found[2] is None else f"{found[1]}: {found[2]}"


def remedy(scheme: str, kind: str, text: str) -> str:
    """Return what a person can do about an error of the client library, by its class and its text.

    >>> remedy("s3", "GenericError", "Error performing GET http://127.0.0.1:45403/run/a in 1.401s: 500 Internal Error")
    'If the service is in trouble, try again later'
    """
    text = re.sub(r"\b\w+://\S+", "", text)  # an address says nothing of why
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return "Create the bucket first, or mend its name in the URL"
    refused = (
        "403 Forbidden",
        "401 Unauthorized",
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "credential",
        "Account must be",
    )
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or any(word in text for word in refused):
        return f"Check who asks and what it may do there: {CREDENTIALS.get(scheme, 'the credentials')}"
    if "error sending request" in text or "timed out" in text or "operation timed" in text or "dns" in text.lower():
        return (
            f"Check that the endpoint can be reached from here ({ENDPOINTS.get(scheme, 'its address')}, proxies); "
            "PHALANX_STORAGE_TIMEOUT says for how many seconds a request is tried again"
        )
    return "If the service is in trouble, try again later"
