"""Code that every room uses: files, tasks, processes, this machine.

It is imported before any package is installed.
"""
