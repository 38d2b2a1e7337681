"""What a process needs of its machine: children, ports, files, disks, a sandbox and its own name."""
