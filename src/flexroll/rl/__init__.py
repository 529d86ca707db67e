"""Reinforcement learning: the engine inside a trainer."""
