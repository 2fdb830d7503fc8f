"""The inputs of each chunk stage, as the check has them."""

from torch_gdn.testing.stages import Stages, stages_of

__all__ = ["Stages", "stages_of"]
