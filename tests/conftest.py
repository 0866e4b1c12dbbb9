import pytest
import torch

torch.set_num_threads(1)  # tests run in parallel processes


@pytest.fixture(autouse=True)
def _double_precision_and_seed():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
