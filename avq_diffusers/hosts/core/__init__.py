"""The contract of hosts: layers, their state, installing and undoing, routes, schedules."""

from avq_diffusers.hosts.core.arguments import named_arguments
from avq_diffusers.hosts.core.examples import as_examples, checked_examples, run_examples
from avq_diffusers.hosts.core.host import Host, Hosted, Other, Watch
from avq_diffusers.hosts.core.installing import (
    CHANGES,
    all_or_nothing,
    install,
    installed,
    uninstall,
)
from avq_diffusers.hosts.core.interception import SCALED_DOT_PRODUCT_ATTENTION
from avq_diffusers.hosts.core.layers import (
    ATTRIBUTE,
    Layer,
    LayerSpec,
    Unchosen,
    as_table,
    check_specs,
    chosen_layers,
    default_config,
    entrance_of,
    own_name,
    short_names,
)
from avq_diffusers.hosts.core.ranks import Ranks, agreed
from avq_diffusers.hosts.core.reading import read_once
from avq_diffusers.hosts.core.routing import (
    check_route,
    device_name,
    is_recorded,
    kept_milliseconds,
)
from avq_diffusers.hosts.core.schedules import (
    EXACT,
    Plan,
    Schedule,
    planned_specs,
    set_specs,
)
from avq_diffusers.hosts.core.sources import (
    CONFIG_FIELDS,
    AVQSource,
    check_known,
    make_states,
    resolved_source,
    states_of_config,
)
from avq_diffusers.hosts.core.state import (
    AVQ_CALL,
    DISABLED,
    REST,
    AttentionFunction,
    Grid,
    LayerState,
    PerThread,
    SpecSchedule,
    Tokens,
    as_attended,
    disabled,
    orders,
)
from avq_diffusers.hosts.core.timesteps import (
    NUM_TRAIN_TIMESTEPS,
    TIMESTEP,
    TimestepArgument,
    Timesteps,
    are_training_timesteps,
    at_timestep,
    rounded_up,
    starts_of_parts,
)
from avq_diffusers.hosts.core.weights import LayerWeights, project
