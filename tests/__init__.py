"""Tests; a package, so that spawned ranks can import what they run."""
