"""What runs in a worker process: the model, and the module that it imports.

Nothing here knows of event loops, sockets of clients, or torch.
"""
