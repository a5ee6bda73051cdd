"""Who holds what: integers only, no tensors and no messages."""

from tilewise.layout.blocks import block, block_of, overlap
from tilewise.layout.cover import Block, Cover, Piece
from tilewise.layout.degrees import Degrees
from tilewise.layout.layout import PARTIAL, REPLICA, Axes, Axis, Layout
from tilewise.layout.move import Message, Move, Transfer
from tilewise.layout.window import Window

__all__ = [
    "PARTIAL",
    "REPLICA",
    "Axes",
    "Axis",
    "Block",
    "Cover",
    "Degrees",
    "Layout",
    "Message",
    "Move",
    "Piece",
    "Transfer",
    "Window",
    "block",
    "block_of",
    "overlap",
]
