"""Replication under random faults, in virtual time: the real replicas, everything else a model.

``python -m p2pkv.testing.sim --seeds 2000`` runs that many schedules. The page
``docs/testing-replication.md`` says what is modelled, what is checked, and how each deliberate
mistake (mutant) is found.
"""
