"""Where metrics go besides the record: nowhere, or Weights & Biases."""

from streambp.bench.tracking.base import Tracker, tracker_for

__all__ = ["Tracker", "tracker_for"]
