"""Turns the name of an image into a folder with its root file system on this node.

Here are the sources of images (registries, OCI layouts, archives, `.sif` files and squashfs), the
unpacking of their layers, and the stores: one on the node, and one that the nodes of a job or a
site share. No sandbox is built here, and no scheduling is done: a worker asks for an image when a
session opens, and nothing here runs while an action waits for its start.
"""
