//! SIGTERM, SIGINT and SIGHUP as a stream of Stop, StopNow and Reload.
