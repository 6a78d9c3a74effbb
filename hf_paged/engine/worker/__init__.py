"""A rank's part of an engine: pools, adapters and runner, which compute the forwards that rank 0 plans."""
