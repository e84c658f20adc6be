"""The error that everything about an epilogue raises."""

from __future__ import annotations


class EpilogueError(ValueError, TypeError):
    """An epilogue that cannot be traced or does not fit a program: the message names the op or limit and what to do."""


class UnknownMethodError(EpilogueError, AttributeError):
    """A tensor method or attribute outside the epilogue language; an AttributeError too, so that `hasattr` is False."""
