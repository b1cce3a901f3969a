//! What an operator talks to while the daemon runs: the unix socket of the command line and HTTP.
