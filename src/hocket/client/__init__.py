"""The trainer's side of HTTP: one server, all servers, model turns."""
