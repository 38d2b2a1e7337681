"""What an actor runs its episodes with, from its configuration."""

from __future__ import annotations

from contextlib import AsyncExitStack

from asyncrl.chat.chat import Chat
from asyncrl.chat.chat_checks import check_tools, report_rewritings
from asyncrl.chat.from_config import open_chat
from asyncrl.config.schema import ActorConfig, TrainConfig
from asyncrl.engine.base import Engine
from asyncrl.episode.episode import EpisodeRunner, Player, ToolPlayer, Watch, unwatched
from asyncrl.episode.group_demonstrations import DemonstrationRecorder
from asyncrl.episode.images import ImageDesk
from asyncrl.episode.recorder import EpisodeLimits
from asyncrl.episode.steps import Split, find_split
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


def open_toolbox(actor: ActorConfig, spans: Spans | None = None, shows_images: bool = False) -> Toolbox | Environments:
    """The tools of `actor.tools` and `actor.mcp_servers`, or the environments, for a policy that sees images if it
    `shows_images`. Raises ConfigError: one of them cannot be used."""
    if actor.has_environments:
        limits = ToolLimits(actor.environment_timeout_s, actor.tool_retries, actor.max_tool_chars)
        return Environments(environment_classes(actor), limits, spans)
    limits = ToolLimits(actor.tool_timeout_s, actor.tool_retries, actor.max_tool_chars)
    Offer(actor)  # refuses names that are there twice
    return Toolbox(tool_classes(actor) | mcp_classes(actor, shows_images), limits, spans)


def _of_episodes(config: TrainConfig) -> tuple[EpisodeLimits, bool, Split]:
    """The limits of episodes, whether branches are as the chat template renders them, and how turns become steps."""
    actor = config.actor
    # An episode with one branch only is not limited by max_total_tokens, which may be less.
    total = max(actor.max_tokens, actor.max_total_tokens)
    prompts = (config.data.max_prompt_length, config.data.truncation)
    limits = EpisodeLimits(actor.max_turns, actor.max_turn_tokens, actor.max_tokens, total, *prompts)
    return limits, actor.history == "template", find_split(actor.step_split)


def demonstration_recorder(config: TrainConfig, chat: Chat) -> DemonstrationRecorder:
    """What records the demonstrations of tasks. Raises ConfigError: a tool cannot be used."""
    return DemonstrationRecorder(chat, Offer(config.actor).always, *_of_episodes(config))


async def open_runner(
    config: TrainConfig,
    engine: Engine,
    stack: AsyncExitStack,
    spans: Spans | None = None,
    chat: Chat | None = None,
    watch: Watch = unwatched,
) -> EpisodeRunner:
    """Runs episodes with the agent that `actor` names, whose server `stack` closes, or else with our own tools or
    environments and simulated users. `spans` get what each episode does, and `watch` the messages of conversations that
    no agent leads. `chat` replaces that of the model.

    Raises ConfigError: the chat template, a tool, a user or the agent cannot be used.
    """
    actor = config.actor
    chat = chat or open_chat(config)
    report_rewritings(chat, actor.history)
    player: Player
    of_episodes, as_rendered, step_split = _of_episodes(config)
    images = ImageDesk.of(config)
    demonstrate = None if config.data.demonstration is None else demonstration_recorder(config, chat)
    if not actor.played_by:
        toolbox = open_toolbox(actor, spans, shows_images=images is not None)
        stack.push_async_callback(toolbox.close)
        for functions in Offer(actor).every:
            check_tools(chat, functions)
        of_users = InteractionLimits(actor.interaction_timeout_s, actor.max_user_turns, actor.max_tool_chars)
        users = Interactions(load_interactions(actor.interactions), of_users)
        player = ToolPlayer(toolbox, read_grammar(actor.response_format), users, watch)
    else:
        from asyncrl.agents.chat_api.opening import open_agent

        player = await open_agent(config, stack, images is not None)
    return EpisodeRunner(
        *(engine, chat, player, of_episodes, as_rendered, step_split),
        spans=spans or NoSpans(),
        demonstrate=demonstrate,
        images=images,
    )
