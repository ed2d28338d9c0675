"""vLLM's CUDA platform on a machine without a GPU: overrides device queries only, so all decisions are vLLM's."""

from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability

MULTIPROCESSORS = 78
MEMORY_BYTES = 96 * 2**30


class FakeHopper(CudaPlatformBase):
    """An H20."""

    capability = DeviceCapability(9, 0)

    @classmethod
    def get_device_capability(cls, device_id=0):
        return cls.capability

    @classmethod
    def get_device_name(cls, device_id=0):
        return "fake H20"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return MEMORY_BYTES

    @classmethod
    def num_compute_units(cls, device_id=0):
        return MULTIPROCESSORS

    @classmethod
    def device_count(cls):
        return 1

    @classmethod
    def is_pin_memory_available(cls):
        return False

    @classmethod
    def is_fully_connected(cls, device_ids):
        return True

    @classmethod
    def log_warnings(cls):
        pass
