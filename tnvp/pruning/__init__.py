"""The method. Imports torch only: usable in anyone's training loop."""

from .channels import NeuronGroup
from .errors import PruningError
from .pruner import Pruner, explain
from .report import GroupReport, PruneReport

__all__ = ["GroupReport", "NeuronGroup", "PruneReport", "Pruner", "PruningError", "explain"]
