"""How the roles' sockets are opened: addresses, CURVE keys, and who is let in. Knows zmq, and no other room."""
