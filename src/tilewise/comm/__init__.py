"""The only place that sends bytes."""

from tilewise.comm.chain import Chain
from tilewise.comm.exchange import Exchange, Pending
from tilewise.comm.frame import Frame
from tilewise.comm.mesh import Group, Mesh
from tilewise.comm.posted import Posted
from tilewise.comm.trace import Event, Trace

__all__ = ["Chain", "Event", "Exchange", "Frame", "Group", "Mesh", "Pending", "Posted", "Trace"]
