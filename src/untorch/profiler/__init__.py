"""Where a call's time goes: ``untorch.profile``, its table and its trace. What ``untorch profile`` runs."""

from untorch.profiler.measure import Profile, Row, profile
from untorch.profiler.roofline import Roofline, measure_roofline

__all__ = ["Profile", "Roofline", "Row", "measure_roofline", "profile"]
