"""The parameters of a running model in the terms of torch.distributed, for other programs.

`state_dict` is what torch.distributed.checkpoint saves and loads under every layout, and
`dtensor_views` are DTensors, for layouts that DTensors can express.
"""

from gridformer.interop.blocks import GlobalBlock, state_dict
from gridformer.interop.views import dtensor_views

__all__ = ["GlobalBlock", "dtensor_views", "state_dict"]
