"""Opens the runner of an actor's episodes from the configuration."""

from __future__ import annotations

from contextlib import AsyncExitStack

from asyncrl.agents.verl_loops import open_verl_loops
from asyncrl.chat.chat import Chat
from asyncrl.chat.chat_checks import check_tools, report_rewritings
from asyncrl.chat.from_config import open_chat
from asyncrl.config import locations
from asyncrl.config.schema import ActorConfig, DataConfig, TrainConfig
from asyncrl.engine.base import Engine
from asyncrl.episode.episode import EpisodeRunner, Player
from asyncrl.episode.group_demonstrations import DemonstrationRecorder
from asyncrl.episode.images import ImageDesk
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.episode.steps import Split, find_split
from asyncrl.episode.tool_player import ToolPlayer, Watch, unwatched
from asyncrl.grammar import read_grammar
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.tools.environments.classes import environment_classes
from asyncrl.tools.environments.environments import Environments
from asyncrl.tools.interactions.registry import load_interactions
from asyncrl.tools.interactions.users import InteractionLimits, Interactions
from asyncrl.tools.mcp.tools import mcp_classes
from asyncrl.tools.offered import Offer
from asyncrl.tools.registry import tool_classes
from asyncrl.tools.toolbox import Toolbox, ToolLimits


async def open_runner(
    config: TrainConfig,
    engine: Engine,
    stack: AsyncExitStack,
    spans: Spans | None = None,
    chat: Chat | None = None,
    watch: Watch = unwatched,
) -> EpisodeRunner:
    """Open the runner. Closing `stack` closes the runner's tools, or the server of its agent.

    If the configuration names an agent, the agent plays the episodes; otherwise `ToolPlayer` does. `spans` records the
    phases of each episode. `watch` is called with the messages of conversations that `ToolPlayer` leads. `chat` is used
    in place of the chat of the configured model. Raises ConfigError: the chat template, a tool, a simulated user or the
    agent cannot be used.
    """
    actor, data = config.actor, config.data
    chat = chat or open_chat(config)
    report_rewritings(chat, actor.history)
    images = ImageDesk.of(config.model, config.engine, data.images, config.network.max_message_mb)
    limits, as_rendered, step_split = _of_episodes(actor, data)
    demonstrate = None if data.demonstration is None else demonstration_recorder(actor, data, chat)
    player: Player
    if actor.has_verl_loops:
        player = open_verl_loops(actor, data, config.model)
    elif actor.played_by:
        # Imported here, because an actor without an agent must not wait for the import of a web server when it starts.
        from asyncrl.agents.chat_api.opening import open_agent

        player = await open_agent(actor, locations.agents_folder(config.run), stack, images is not None)
    else:
        player = _tool_player(actor, chat, stack, spans, watch, shows_images=images is not None)
    return EpisodeRunner(
        *(engine, chat, player, limits, as_rendered, step_split),
        spans=spans or NoSpans(),
        demonstrate=demonstrate,
        images=images,
    )


def _tool_player(
    actor: ActorConfig, chat: Chat, stack: AsyncExitStack, spans: Spans | None, watch: Watch, shows_images: bool
) -> ToolPlayer:
    toolbox = open_toolbox(actor, spans, shows_images)
    stack.push_async_callback(toolbox.close)
    for functions in Offer(actor).every:
        check_tools(chat, functions)
    limits = InteractionLimits(actor.interaction_timeout_s, actor.max_user_turns, actor.max_tool_chars)
    users = Interactions(load_interactions(actor.interactions), limits)
    return ToolPlayer(toolbox, read_grammar(actor.response_format), users, watch)


def open_toolbox(actor: ActorConfig, spans: Spans | None = None, shows_images: bool = False) -> Toolbox | Environments:
    """The tools of `actor.tools` and `actor.mcp_servers`, or the environments.

    `shows_images` is true if the policy sees images. Raises ConfigError: a tool or an environment cannot be used.
    """
    if actor.has_environments:
        limits = ToolLimits(actor.environment_timeout_s, actor.tool_retries, actor.max_tool_chars)
        return Environments(environment_classes(actor), limits, spans)
    limits = ToolLimits(actor.tool_timeout_s, actor.tool_retries, actor.max_tool_chars)
    Offer(actor)  # Refuses a name that two tools have.
    return Toolbox(tool_classes(actor) | mcp_classes(actor, shows_images), limits, spans)


def demonstration_recorder(actor: ActorConfig, data: DataConfig, chat: Chat) -> DemonstrationRecorder:
    """The recorder of tasks' demonstrations. Raises ConfigError: a tool cannot be used."""
    return DemonstrationRecorder(chat, Offer(actor).always, *_of_episodes(actor, data))


def _of_episodes(actor: ActorConfig, data: DataConfig) -> tuple[EpisodeLimits, bool, Split]:
    """The limits of episodes, whether each completion is compared with the rendering of the chat template, and the
    split into steps."""
    # max_total_tokens may be less than max_tokens, but must not limit an episode that is a single sequence.
    total = max(actor.max_tokens, actor.max_total_tokens)
    prompts = (data.max_prompt_length, data.truncation)
    limits = EpisodeLimits(actor.max_turns, actor.max_turn_tokens, actor.max_tokens, total, *prompts)
    return limits, actor.history == "template", find_split(actor.step_split)
