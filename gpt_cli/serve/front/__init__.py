"""The layer between the network and the routes: sockets, the guard and the log."""
