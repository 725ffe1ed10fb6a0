"""Fakes and servers for tests of code that uses object stores."""
