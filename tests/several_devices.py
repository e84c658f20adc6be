"""Devices and streams that a test makes up: for `emulated_device`, with both ways of reading tensors.

A tensor is on device 0, or where it was put; each thread has a device of its own, and a stream of each device.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_PYTHON = ctypes.pythonapi
_PYTHON.PyCapsule_New.restype = ctypes.py_object
_PYTHON.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_PYTHON.PyCapsule_GetPointer.restype = ctypes.c_void_p
_PYTHON.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_CAPSULE = b"dlpack_exchange_api"  # PyCapsule_New keeps the pointer

# These are called with the interpreter's lock held.
_Read = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_CurrentStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class _Tensor(ctypes.Structure):
    """The beginning of DLPack's DLTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32)]


class _Api(ctypes.Structure):
    """DLPack's DLPackExchangeAPI."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("previous", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("read", _Read),
        ("current_stream", _CurrentStream),
    ]


class SeveralDevices:
    """`functions`: what `emulated_device` takes."""

    def __init__(self) -> None:
        self._index_at: dict[int, int] = {}
        self._here = threading.local()
        self.functions: dict[str, Any] = {"current_device": self.current_device, "current_stream": self.stream_of}
        capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
        if capsule is not None:
            self.functions["exchange_api"] = self._exchange_api(capsule)

    def put(self, tensor: Tensor, index: int) -> Tensor:
        """The tensor, which is on that device from now on."""
        self._index_at[tensor.data_ptr()] = index
        return tensor

    def current_device(self) -> int:
        return getattr(self._here, "device", 0)

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        """What `torch.cuda.set_device` sets: for this thread."""
        before, self._here.device = self.current_device(), index
        try:
            yield
        finally:
            self._here.device = before

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        before = getattr(self._here, "stream", 0)
        self._here.stream = number
        try:
            yield
        finally:
            self._here.stream = before

    def stream_of(self, index: int) -> int:
        """The handle of this thread's stream: another one on each device."""
        return 1000 * (index + 1) + int(getattr(self._here, "stream", 0))

    def _exchange_api(self, capsule: object) -> object:
        """PyTorch's own, with the devices and streams of here."""
        original = _Api.from_address(_PYTHON.PyCapsule_GetPointer(capsule, _CAPSULE))
        read_original: Callable[[Any, int], int] = original.read

        def read(tensor: Any, out: int) -> int:
            status = read_original(tensor, out)
            found = _Tensor.from_address(out)
            found.device_index = self._index_at.get(found.data or 0, 0)
            return status

        def current_stream(device_type: int, index: int, out: Any) -> int:
            out[0] = self.stream_of(index)
            return 0

        self._kept = _Read(read), _CurrentStream(current_stream)
        self._api = _Api(original.version, original.previous, original.unused, *self._kept)
        return _PYTHON.PyCapsule_New(ctypes.addressof(self._api), _CAPSULE, None)
