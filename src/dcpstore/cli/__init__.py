"""The command line ``dcpstore``: parses and prints, and leaves the work to the library.

A command is a module of its own, imported when its name is given (see
`dcpstore.cli.main`), so that ``dcpstore ls`` starts without waiting for torch.
"""
