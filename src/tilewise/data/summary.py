"""What a loader read and keeps."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.data.amplification import size_text


@dataclass(frozen=True)
class Summary:
    """Bytes on one rank, and the share of the set that all ranks keep in memory between them.

    Attributes:
        file_bytes: asked of the files so far.
        touched_bytes: gone through for it, chunks and pages read whole.
        store_bytes: kept in memory.
        store_share: of the set's bytes; None where there is no store.
    """

    file_bytes: int
    touched_bytes: int
    store_bytes: int
    store_share: float | None

    def __str__(self) -> str:
        text = f"read {size_text(self.file_bytes)} from files"
        if self.touched_bytes > self.file_bytes:
            factor = self.touched_bytes / self.file_bytes
            text += f" ({factor:.1f} times that with whole chunks or pages)"
        if self.store_share is None:
            return f"{text}; no store"
        text += f"; the store keeps {self.store_share:.0%} of the set, here "
        text += size_text(self.store_bytes)
        if self.store_share < 1:
            text += f"; {1 - self.store_share:.0%} is read from files again in every epoch"
        return text
