"""The trainer's side of HTTP: one server, which servers are up, many turns in one request."""
