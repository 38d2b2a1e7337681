"""How the roles' sockets are opened, and who is let in. Knows zmq and the configuration's schema, and no other room."""
