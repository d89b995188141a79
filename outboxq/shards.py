"""Several databases, and the one that a key belongs to."""

import hashlib
from collections.abc import Sequence

from outboxq.errors import ArgumentError


def shard_of(key: str, shards: Sequence[str]) -> str:
    """Return the name of the shard that a key belongs to: the same in every process and every version.

    Rendezvous hashing (Thaler and Ravishankar, 1996): each shard draws a number for the key, and the highest wins. If a
    shard is added, only keys that move to it change their shard; if one is removed, only its own keys do.

    Raises:
        ArgumentError: there are no shards, a name appears twice, or a key or a name is no text.
    """
    if not isinstance(key, str) or not all(isinstance(name, str) for name in shards) or isinstance(shards, str):
        raise ArgumentError("shard_of takes a text and the names of the shards: shard_of(str(tenant_id), ['a', 'b'])")
    if not shards or len(set(shards)) != len(shards):
        raise ArgumentError(f"shard_of takes at least one shard, each name once, got {list(shards)!r}")
    return max(shards, key=lambda name: (_drawn(name, key), name))


def _drawn(name: str, key: str) -> bytes:
    # The lengths separate name and key, with any content.
    parts = name.encode(), key.encode()
    return hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).digest()
