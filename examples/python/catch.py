# SPDX-License-Identifier: Apache-2.0
"""An environment of images for impala.py: nothing to download, and learned in a minute."""

import gymnasium as gym
import numpy as np


class Catch(gym.Env):
    """A ball falls, and the paddle at the bottom catches it or not: 1 or -1. Each cell of the grid has 2 x 2 pixels."""

    observation_space, action_space = gym.spaces.Box(0, 255, (1, 20, 20), np.uint8), gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.paddle, self.x, self.y = 5, int(self.np_random.integers(10)), 0
        return self.image(), {}

    def step(self, action):
        self.paddle, self.y = min(max(self.paddle + int(action) - 1, 0), 9), self.y + 1
        fell = self.y == 9
        return self.image(), (1.0 if self.x == self.paddle else -1.0) if fell else 0.0, fell, False, {}

    def image(self):
        image = np.zeros((1, 20, 20), np.uint8)
        image[0, 2 * self.y : 2 * self.y + 2, 2 * self.x : 2 * self.x + 2] = 255
        image[0, 18:, 2 * self.paddle : 2 * self.paddle + 2] = 255
        return image


gym.register("Catch-v0", Catch, reward_threshold=0.9)
