"""What the client does, without I/O, framework or clock: values come in, decisions go out."""
