"""Routed experts that stay in their files: read when they are routed to, kept in a cache of bounded size."""

from .store import DEFAULT_CACHE_BYTES, ExpertStorageReport, ExpertStore

__all__ = ["DEFAULT_CACHE_BYTES", "ExpertStorageReport", "ExpertStore"]
