import pytest
import zmq


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)
