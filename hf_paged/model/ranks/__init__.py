"""Several processes that compute one model together: connections, votes, sums, divided layers."""
