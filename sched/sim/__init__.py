"""A simulated world for the real core and shell: device, staging and time, all from one seed."""

from .device import SimExecutor, SimFaults, SimImage, SimStager, SimThread, token_of

__all__ = ["SimExecutor", "SimFaults", "SimImage", "SimStager", "SimThread", "token_of"]
