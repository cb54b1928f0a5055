"""Temporal Neuron Variance Pruning: watch neurons while a network trains, remove those that hardly vary."""

from tnvp.checkpoint import load, save
from tnvp.pruning import NeuronGroup, Pruner, PruneReport, PruningError, explain
from tnvp.pruning.leaves import stale_leaves

__all__ = ["NeuronGroup", "PruneReport", "Pruner", "PruningError", "explain", "load", "save", "stale_leaves"]
